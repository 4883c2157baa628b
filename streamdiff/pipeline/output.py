"""Model info, frames, and how far a stream is: what a pipeline reports and what it produces. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamdiff import clock
from streamdiff.session_state.fields import DERIVED, KEPT, STATE, session_state


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model, by name, and how it runs: sizes in pixels; `chunk_frames` frames come out of one chunk. `steps`
    and `kv_context` are those of a session that does not name its own, `steps_known` the numbers of steps that it may
    name, `switch` what a new prompt does to the past (PROMPT_POLICIES) unless it says. `text_shape` is (most rows,
    width) of a prompt's embeddings, `chunk_shape` that of a chunk's latents, `[C, F, h, w]`, and `first_chunks` how
    many are made together at a stream's beginning; without them it takes no features that were made elsewhere."""

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
    text_shape: tuple[int, ...] = ()
    chunk_shape: tuple[int, ...] = ()
    first_chunks: int = 1


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


@dataclass(frozen=True)
class InputFigures:
    """A session's video input: the noise level of the latest chunk, None before the first; frames that were used, and
    that came too fast; what ended it, where it failed."""

    level: float | None
    used: int
    dropped: int
    fault: str = ""


@session_state("chunk-made")
@dataclass
class StreamChunk:
    """A chunk that is in the ring or decoding. `cost` is relative to a chunk in the default number of steps;
    `admitted_s` is on this process's clock."""

    epoch: int = field(metadata=KEPT)
    cost: float = field(metadata=KEPT)
    admitted_s: float = field(default_factory=clock.monotonic_s, metadata=DERIVED)


@session_state("stream")
@dataclass
class StreamProgress:
    """One run of a session, from open or reset to the next reset. `number` is unique, so late pieces of an earlier run
    are dropped; `ahead_frames` are admitted and not handed out yet, `frame_credit` is as `set_frame_credit` said, and
    `decoding` counts chunks that are finished and not handed out whole."""

    number: int = field(metadata=DERIVED)
    session: int = field(metadata=DERIVED)
    background: bool = field(default=False, metadata=KEPT)
    decoding: int = field(default=0, metadata=DERIVED)
    frame_credit: int = field(default=0, metadata=DERIVED)
    chunks: dict[int, StreamChunk] = field(default_factory=dict, metadata=STATE)
    ahead_frames: int = field(default=0, metadata=STATE)
