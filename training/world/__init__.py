"""The world that the embedded model is trained on: how it moves, and how it is drawn."""
