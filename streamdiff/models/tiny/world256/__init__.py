"""The next world of the embedded model: 256 x 256 pixels, two things, a camera, hours and weather.

It lies beside the 128 pixel world (`models.tiny.world`) until weights for it are packaged; then it takes its place.
"""
