"""Rolling KV caches with a sink, and the attention that reads them; knows nothing about prompts.

A chunk's slot follows from its number alone, on every rank, or, where the sink takes chunks in, is found on the device.
Only where rows of several sessions share a graph are slots found by numbers that are tensors (`pooled_attention`).
"""
