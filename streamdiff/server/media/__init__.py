"""Pictures on their way to viewers: pacing, encoding once, and handing packets to everybody."""
