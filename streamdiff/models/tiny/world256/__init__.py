"""Procedural 256 x 256 world for the embedded model: scenes of two things, camera, time of day and weather, their
renderer, their vocabulary and the training on them.

It lies beside the 128 pixel world (`models.tiny.world`) until weights for it are packaged; then it takes its place.
"""
