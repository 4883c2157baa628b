"""Confines a failed row to its session, on every stage and on rank 0."""
