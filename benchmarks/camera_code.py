"""A number that changes three times a second, drawn so large that it survives an autoencoder, for a browser's camera.

Six fields in the square middle of the picture: one always white, one always black, and four bits of a Gray code, of
which one changes at a time. The embedded model gives it back at a strength near 0, as that leaves nearly all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLUMNS, ROWS, BITS = 3, 2, 4
CODES = 1 << BITS
FPS = 30
HELD_FRAMES = 10
"""How long a code is shown: longer than the autoencoder's latent frame, which blurs the moment of its change."""
WIDTH, HEIGHT = 640, 480
PERIOD_S = CODES * HELD_FRAMES / FPS

READ = """
const [seconds, columns, rows, done] = arguments;
const canvas = new OffscreenCanvas(16 * columns, 16 * rows);
const context = canvas.getContext("2d", { willReadFrequently: true });
const found = { camera: [], screen: [], unreadable: { camera: 0, screen: 0 } };
const end = performance.now() + 1000 * seconds;
function read(video) {
  const [width, height] = [video.videoWidth, video.videoHeight];
  const side = Math.min(width, height);
  context.drawImage(video, (width - side) / 2, (height - side) / 2, side, side, 0, 0, canvas.width, canvas.height);
  const fields = [];
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const data = context.getImageData(16 * column + 5, 16 * row + 5, 6, 6).data;
      let sum = 0;
      for (let at = 0; at < data.length; at += 4) sum += data[at] + data[at + 1] + data[at + 2];
      fields.push(sum / (data.length / 4 * 3));
    }
  }
  const [white, black, ...bits] = fields;
  if (white - black < 60) return null;
  let gray = bits.reduce((sum, bit, place) => sum + (bit > (white + black) / 2 ? 1 << place : 0), 0);
  let code = 0;
  for (; gray; gray >>= 1) code ^= gray;
  return code;
}
function watch(name, video) {
  let last = null;
  const look = () => {
    const code = read(video);
    if (code === null) found.unreadable[name] += 1;
    else if (code !== last) { last = code; found[name].push([performance.now(), code]); }
    if (performance.now() < end) video.requestVideoFrameCallback(look);
  };
  video.requestVideoFrameCallback(look);
}
watch("camera", document.getElementById("camera-preview"));
watch("screen", document.getElementById("video"));
setTimeout(() => done(found), 1000 * seconds + 500);
"""
"""Notes when the camera's preview and the page's video begin to show each code, in milliseconds."""


def picture(code: int) -> NDArray[np.uint8]:
    """Grey values `[HEIGHT, WIDTH]` of one code."""
    gray = code ^ (code >> 1)
    fields = np.array([1, 0, *((gray >> bit) & 1 for bit in range(BITS))], np.uint8).reshape(ROWS, COLUMNS) * 255
    square = fields.repeat(HEIGHT // ROWS, 0).repeat(HEIGHT // COLUMNS, 1)
    made = np.full((HEIGHT, WIDTH), 128, np.uint8)
    made[:, (WIDTH - HEIGHT) // 2 : (WIDTH + HEIGHT) // 2] = square
    return made


def read(picture: NDArray[np.uint8]) -> int | None:
    """The code in a square picture uint8 `[H, W, 3]`, as the page's reader has it; None: it cannot be made out."""
    height, width, _ = picture.shape
    fields = []
    for field in range(COLUMNS * ROWS):
        row, column = divmod(field, COLUMNS)
        rows = slice((16 * row + 5) * height // (16 * ROWS), (16 * row + 11) * height // (16 * ROWS))
        columns = slice((16 * column + 5) * width // (16 * COLUMNS), (16 * column + 11) * width // (16 * COLUMNS))
        fields.append(float(picture[rows, columns].mean()))
    white, black, *bits = fields
    if white - black < 60:
        return None
    gray = sum((bit > (white + black) / 2) << place for place, bit in enumerate(bits))
    code = 0
    while gray:
        code, gray = code ^ gray, gray >> 1
    return code


def write_y4m(path: Path) -> Path:
    """A file that a browser's camera shows again and again, all codes one after the other; 74 MB."""
    colour = np.full((HEIGHT // 2, WIDTH // 2), 128, np.uint8).tobytes() * 2
    with path.open("wb") as file:
        file.write(f"YUV4MPEG2 W{WIDTH} H{HEIGHT} F{FPS}:1 Ip A1:1 C420jpeg\n".encode())
        for code in range(CODES):
            frame = b"FRAME\n" + picture(code).tobytes() + colour
            for _ in range(HELD_FRAMES):
                file.write(frame)
    return path


def latencies(camera: Sequence[Sequence[float]], screen: Sequence[Sequence[float]]) -> list[float]:
    """Milliseconds from each code's beginning on `camera` to that on `screen`, both `[ms, code]` in order. A code that
    is not seen within a period is left out."""
    found: list[float] = []
    for begun_ms, code in camera:
        later = (ms - begun_ms for ms, each in screen if each == code and ms >= begun_ms)
        if (ms := next(later, None)) is not None and ms < 1000 * (PERIOD_S - 1):
            found.append(ms)
    return found
