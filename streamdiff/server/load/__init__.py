"""Load of the engine: its capacity, admission, and the policy that lowers steps or frame rate of sessions above it."""
