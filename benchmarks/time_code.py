"""A time drawn into a picture so that it survives scaling and lossy compression, and read back.

32 squares at the top of the picture, white for 1: 24 bits of milliseconds and 8 bits of their sum. Also an engine whose
pictures carry the time they were made at: `python -m benchmarks.time_code serve` is `streamdiff serve` with it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import numpy as np
from numpy.typing import NDArray

from streamdiff import clock
from streamdiff.config import Config, PlaybackConfig, ServeConfig
from tests.fake_pipeline import FakeStream
from tests.server import scripted

COLUMNS, ROWS = 16, 2
SIDE = 8
"""Pixels of a square before the picture is enlarged."""
PERIOD_MS = 1 << 24

READ = """
const [seconds, columns, rows, side, period, done] = arguments;
const video = document.getElementById("video");
const [width, height] = [columns * side, rows * side];
const canvas = new OffscreenCanvas(width, height);
const context = canvas.getContext("2d", { willReadFrequently: true });
const found = { latencies: [], unreadable: 0, repeated: 0, network: [] };
const end = performance.now() + 1000 * seconds;
let last = -1;
function look(now, metadata) {
  const scale = video.videoWidth / width;
  context.drawImage(video, 0, 0, video.videoWidth, height * scale, 0, 0, width, height);
  const shownAt = performance.timeOrigin + performance.now();
  const data = context.getImageData(0, 0, width, height).data;
  const bits = [];
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const at = 4 * ((row * side + side / 2) * width + column * side + side / 2);
      bits.push(data[at + 1] > 127 ? 1 : 0);
    }
  }
  const number = (part) => part.reduce((sum, bit) => 2 * sum + bit, 0);
  const bytes = [0, 8, 16, 24].map((at) => number(bits.slice(at, at + 8)));
  const code = number(bits.slice(0, 24));
  if (((bytes[0] + bytes[1] + bytes[2]) & 255) !== bytes[3]) found.unreadable += 1;
  else if (code === last) found.repeated += 1;
  else {
    last = code;
    found.latencies.push((((shownAt - code) % period) + period) % period);
    if (metadata.receiveTime) found.network.push(performance.timeOrigin + metadata.receiveTime - shownAt);
  }
  if (performance.now() > end) done(found);
  else video.requestVideoFrameCallback(look);
}
video.requestVideoFrameCallback(look);
"""
"""Reads codes from the page's video for some seconds: milliseconds from each code's time to its picture's."""


def draw(picture: NDArray[np.uint8], ms: int) -> None:
    """Draw `ms` (modulo `PERIOD_MS`) into uint8 `[H, W, 3]`, at least 16 x 128. Mutates: picture."""
    code = ms % PERIOD_MS
    total = sum(code.to_bytes(3, "big")) & 255
    bits = [int(bit) for bit in f"{code:024b}{total:08b}"]
    squares = np.array(bits, np.uint8).reshape(ROWS, COLUMNS) * 255
    picture[: ROWS * SIDE, : COLUMNS * SIDE] = squares.repeat(SIDE, 0).repeat(SIDE, 1)[..., None]


def read(picture: NDArray[np.uint8]) -> int | None:
    """The milliseconds that `draw` drew, in a picture of any size; None where they cannot be made out."""
    scale = picture.shape[1] / (COLUMNS * SIDE)
    rows, columns = (((np.arange(n) + 0.5) * SIDE * scale).astype(int) for n in (ROWS, COLUMNS))
    bits = (picture[np.ix_(rows, columns)][..., 1] > 127).ravel()
    code = int("".join("01"[int(bit)] for bit in bits[:24]), 2)
    total = int("".join("01"[int(bit)] for bit in bits[24:]), 2)
    return code if sum(code.to_bytes(3, "big")) & 255 == total else None


class ClockPainter(scripted.Painter):
    """Pictures that carry the wall clock's time at which they were painted."""

    def _paint(self, stream: FakeStream, number: int) -> NDArray[np.uint8]:
        picture = super()._paint(stream, number)
        # Frames of a chunk are made at once; one millisecond apart, they can be told from each other.
        draw(picture, round(clock.wall_s() * 1000) + number)
        return picture


def main() -> int:
    """`serve`: a whole server. Anything else: the engine process of one."""
    if sys.argv[1] != "serve":
        return scripted.paint(ClockPainter(chunk_s=0.02))
    # The web server's half is for its own process, engines start without.
    from streamdiff.engine.process.engine_process import EngineProcess
    from streamdiff.server import main as server

    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--max-ahead-s", type=float, default=PlaybackConfig().max_ahead_s)
    parser.add_argument("--fps", type=float, default=PlaybackConfig().fps)
    parser.add_argument("--max-viewers", type=int, default=ServeConfig().max_viewers)
    arguments = parser.parse_args()
    playback = PlaybackConfig(max_ahead_s=arguments.max_ahead_s, fps=arguments.fps)
    config = Config(
        serve=ServeConfig(port=0, open_browser=False, max_viewers=arguments.max_viewers, address_share=1.0),
        playback=playback,
    )
    return server.run(config, supervise=partial(EngineProcess, module="benchmarks.time_code"))


if __name__ == "__main__":
    sys.exit(main())
