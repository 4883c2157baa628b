"""Model info and frames: what a pipeline reports and what it produces. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model, by name, and how it runs: sizes in pixels; `chunk_frames` frames come out of one chunk. `steps`
    and `kv_context` are those of a session that does not name its own, `steps_known` the numbers of steps that it may
    name, `switch` what a new prompt does to the past (PROMPT_POLICIES) unless it says."""

    model: str
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
