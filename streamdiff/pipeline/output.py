"""What a pipeline says of itself, and what comes out of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ModelInfo:
    """What a loaded model is; sizes in pixels. `steps` and `kv_context` are those of a session that does not name its
    own, `steps_known` the numbers of steps that it may name, `switch` what a new prompt does to the past unless it
    says."""

    name: str
    device: str
    width: int
    height: int
    native_fps: float
    chunk_frames: int
    steps: int
    kv_context: str
    steps_known: tuple[int, ...] = ()
    switch: str = "keep"


@dataclass(frozen=True)
class Frames:
    """Decoded frames of one chunk, in order, possibly several pieces per chunk.

    pictures are uint8 `[n, *P]`, P as in `streamdiff.video.pixel_format`; `last` marks a chunk's last piece, which also
    tells the seconds from the chunk's admission until now.
    """

    session: int
    chunk: int
    epoch: int
    pictures: NDArray[np.uint8]
    last: bool
    chunk_s: float | None
