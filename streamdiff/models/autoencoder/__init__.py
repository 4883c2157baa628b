"""Latents to pictures and back, streaming: Wan's VAE and the TAEHV family."""
