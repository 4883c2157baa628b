"""Decides which micro-step enters the ring of stages next: pure logic, no torch, no clock, no I/O."""
