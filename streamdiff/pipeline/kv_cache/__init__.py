"""Rolling KV caches with a sink, and the attention that reads them; knows nothing about prompts.

There is no block table and no paging: a chunk's slot follows from its number alone, on every rank, or, where the sink
takes chunks in, is found on the device.
"""
