"""Video that comes in while a session runs: encoded beside the ring, and what its chunks start from."""
