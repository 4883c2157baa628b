"""Rolling KV caches with a sink, and the attention that reads them; knows nothing about prompts.

Layout: each session has, on each stage, preallocated rings of chunk slots, `[caches, layers, slots, tokens, H, d]`
(`KVCache`). A chunk's slot follows from its number alone, on every rank, or, where the sink takes chunks in, is found
on the device, so there is no block allocator, no block table per session and no prefix sharing. Where CUDA graphs are
captured, the rings of several sessions lie in one pool (`CachePool`); a captured forward with rows of several sessions
reads it by slot numbers, with a paged kernel or a gather for each row (`attend_pooled`).
"""
