"""Decode workers: threads and ranks that turn finished latents into pictures in host memory, beside the transformer."""
