"""The embedded model: a procedural world, a small Wan transformer and autoencoder trained on it, packaged weights."""
