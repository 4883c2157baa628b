"""What enters the ring next: pure logic, no torch, no clock, no I/O."""
