"""Decodes latents to pictures in host memory, concurrently with the transformer."""
