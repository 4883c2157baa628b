"""A video made into another: `python restyle.py [VIDEO]` writes restyled.mp4, the input left, the stream beside it.

Shape, colour and background become the prompt's. Without a video it takes one that the model makes itself. The result
plays at the model's rate. The embedded model follows videos of its own world, but not always (docs/input.md).
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

import streamdiff
from streamdiff.video.files import open_clip, write_video
from streamdiff.video.picture import fit_picture


def restyled(session: streamdiff.StreamSession, video: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Each frame of `video`, and beside it what the stream has made of it."""
    while len(piece := list(islice(video, session.chunk_frames))) == session.chunk_frames:
        fitted = [fit_picture(frame, session.width, session.height) for frame in piece]
        session.feed(np.stack(fitted))
        for before, after in zip(fitted, session, strict=False):  # a stream's first chunk may show fewer
            yield np.hstack([before, after])


with streamdiff.open("a red circle moving right over a meadow", seed=1) as session:
    video = open_clip(Path(sys.argv[1])) if len(sys.argv) > 1 else list(islice(session, 96))
    session.set_prompt("a blue star moving right at night")
    session.video(strength=0.4)
    session.reset(seed=3)
    write_video(Path("restyled.mp4"), restyled(session, iter(video)), session.fps)
video_name = sys.argv[1] if len(sys.argv) > 1 else "a red circle"
print(f"restyled.mp4 shows {video_name}, and beside it the blue star of the prompt")
