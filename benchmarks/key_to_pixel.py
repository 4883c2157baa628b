"""How long a key takes to change the picture, in headless Chromium: `benchmarks.glass_to_glass --keys`.

The world stands still; a key moves its first thing. A press counts from the page's `keydown` event to the first
presented picture with a block that has changed. Its parts, by the receipts as the page gets them:

- `input`: until the engine holds the key;
- `chunk`: until the first chunk that obeys is made: the rest of the one in work, its own forwards, decoding. Of it
  `work` is a whole chunk's, by the server's statistics;
- `playout`: until its first frame leaves the server's buffer;
- `screen`: encoding, network, jitter buffer, decoding, screen refresh.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from selenium import webdriver

SCENE = "a big red circle standing still in the desert, at noon, clear weather"
KEYS = ("ArrowRight", "ArrowLeft")
STILL_S = (2.0, 3.0)
"""From a key's release to the next press: at any moment of a chunk."""

PRESS = """
const [code, limitMs, done] = arguments;
const video = document.getElementById("video");
const canvas = globalThis.keyCanvas ??= new OffscreenCanvas(32, 32);
const context = canvas.getContext("2d", { willReadFrequently: true });
const look = () => {
  context.drawImage(video, 0, 0, 32, 32);
  return context.getImageData(0, 0, 32, 32).data;
};
const before = look(), at = {};
const client = streamdiff.client;
const onMessage = ({ detail }) => {
  if (detail.type === "receipt" && detail.kind === "control") at[detail.stage] ??= performance.now() - pressed;
};
client.addEventListener("message", onMessage);
const press = (type) => document.body.dispatchEvent(new KeyboardEvent(type, { code, bubbles: true, cancelable: true }));
const pressed = performance.now();
press("keydown");
const end = (pixelMs) => {
  press("keyup");
  client.removeEventListener("message", onMessage);
  done({ ...at, pixel: pixelMs });
};
function presented(now) {
  const data = look();
  let changed = 0;
  for (let i = 0; i < data.length; i += 4) {
    changed += Math.max(...[0, 1, 2].map((c) => Math.abs(data[i + c] - before[i + c]))) > 60;
  }
  if (changed > 4) end(now - pressed);
  else if (now - pressed > limitMs) end(null);
  else video.requestVideoFrameCallback(presented);
}
video.requestVideoFrameCallback(presented);
"""


def presses(browser: webdriver.Chrome, count: int, limit_s: float) -> list[dict[str, float]]:
    """Milliseconds from a press to `accepted`, `applied`, `shown` and `pixel`, of each of `count` presses.

    Raises:
        SystemExit: a press does not change the picture within `limit_s`.
    """
    found, chance = [], random.Random(0)
    for number in range(count):
        seen = browser.execute_async_script(PRESS, KEYS[number % 2], 1000 * limit_s)
        if seen["pixel"] is None:
            raise SystemExit(f"the picture has not changed {limit_s:g} s after a key; receipts: {seen}")
        found.append(seen)
        time.sleep(chance.uniform(*STILL_S))
    return found


def parts(found: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the parts of presses that have all their receipts, in milliseconds."""
    whole = [each for each in found if {"accepted", "applied", "shown"} <= each.keys()]
    steps = {"input": (None, "accepted"), "chunk": ("accepted", "applied"), "playout": ("applied", "shown"),
             "screen": ("shown", "pixel")}  # fmt: skip
    return {
        name: round(statistics.median(each[end] - (each[begin] if begin else 0.0) for each in whole), 1)
        for name, (begin, end) in steps.items()
        if whole
    }
