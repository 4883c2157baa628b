"""Training the embedded model: `python -m streamdiff.models.tiny.training`."""
