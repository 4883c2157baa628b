"""Pixel formats and video files: what a picture is, reading and writing clips."""
