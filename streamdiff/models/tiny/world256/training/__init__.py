"""Training of the embedded model for the 256 pixel world: `python -m streamdiff.models.tiny.world256.training`."""
