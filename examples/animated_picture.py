"""A stream as an animated picture, for a README or a chat: `python animated_picture.py [FILE.webp] [SECONDS] [MODEL]`.

The prompt changes on the way. Every third frame is taken, and the quality is the best at which the file has at most two
million bytes; where the lowest has more, nothing is written.
"""

import io
import sys
from itertools import islice
from pathlib import Path

from PIL import Image

import streamdiff

PROMPTS = (
    "a red circle moving right and a small yellow star bouncing over a meadow, camera panning left",
    "now at night",
    "a white heart moving up slowly over the sea at dusk in the snow",
    "make it purple, and now in the city at night",
)
MOST_BYTES, EVERY = 2_000_000, 3

path = Path(sys.argv[1] if len(sys.argv) > 1 else "stream.webp")
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 16.0
model = sys.argv[3] if len(sys.argv) > 3 else "tiny"

pictures = []
with streamdiff.open(PROMPTS[0], model=model, seed=1) as session:
    for number, prompt in enumerate(PROMPTS):
        if number:
            session.set_prompt(prompt)
        frames = islice(session, round(seconds * session.fps / len(PROMPTS)))
        pictures += [Image.fromarray(frame) for frame in islice(frames, 0, None, EVERY)]
    shown_ms = round(1000 * EVERY / session.fps)

for quality in (80, 65, 50, 35, 20, 5):
    file = io.BytesIO()
    pictures[0].save(
        file, "WEBP", save_all=True, append_images=pictures[1:], duration=shown_ms, loop=0, quality=quality
    )
    if file.tell() <= MOST_BYTES:
        break
else:
    sys.exit(f"over {MOST_BYTES:,} bytes even at quality {quality}; give fewer SECONDS")
path.write_bytes(file.getvalue())
print(f"wrote {path}: {len(pictures)} pictures, {file.tell()} bytes, quality {quality}")
