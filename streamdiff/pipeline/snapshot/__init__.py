"""Sessions as files: what of a session lies where in a ring is put together, and put back, on any number of stages."""
