"""Prompts to embeddings: UMT5, and embeddings kept for later."""
