"""Two seconds of a prompt, as a video file: python examples/generate_file.py [prompt] [file]."""

import sys
from pathlib import Path

import streamdiff
from streamdiff.video.files import write_video

prompt = sys.argv[1] if len(sys.argv) > 1 else "a yellow star moving up in the desert"
path = Path(sys.argv[2] if len(sys.argv) > 2 else "star.mp4")

with streamdiff.open(prompt, seed=7) as session:
    frames = (frame for _, frame in zip(range(round(2 * session.fps)), session, strict=False))
    write_video(path, frames, session.fps)
print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")
