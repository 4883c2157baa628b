"""Training the embedded model: `python -m training`."""
