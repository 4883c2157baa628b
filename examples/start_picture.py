"""A stream that begins with a picture: `python start_picture.py [PICTURE]` writes moving.mp4.

Without a picture it takes one that the model makes itself: a frame of one stream is where the next one begins.
"""

import sys
from itertools import islice
from pathlib import Path

import streamdiff
from streamdiff.video.files import write_video

PROMPT = "a white star moving left at night"

with streamdiff.open(PROMPT, seed=5) as session:
    picture = sys.argv[1] if len(sys.argv) > 1 else list(islice(session, 30))[-1]
    session.reset(seed=1, image=picture)
    write_video(Path("moving.mp4"), islice(session, 72), session.fps)
print("moving.mp4 begins with", sys.argv[1] if len(sys.argv) > 1 else "the last frame of another stream")
