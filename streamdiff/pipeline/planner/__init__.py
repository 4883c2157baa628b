"""Before anything runs: which rank gets which blocks, where the decoder goes, what it takes in memory and time.

From facts and costs alone, and from the scheduler under virtual time; only `kv_budget` looks at a device.
"""
