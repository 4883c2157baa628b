"""Latents to pictures in host memory, beside the transformer."""
