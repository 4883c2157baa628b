"""Plans a ring before it runs: which rank gets which blocks, where the decoder goes, memory and throughput.

Works from sizes and costs, and simulates the scheduler under virtual time; only `kv_budget` looks at a device.
"""
