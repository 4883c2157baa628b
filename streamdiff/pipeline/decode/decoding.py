"""The `Decoding` protocol of the pipeline, whichever rank decodes, and exchange keys of decoder states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.pipeline.distributed.message import Outcome
from streamdiff.pipeline.distributed.state_exchange import State

NO_STREAM = -1
"""A SAVE of it asks for `outlines`."""


SHAPE_KEY = "decoder: chunk shape"
"""Exchange key of a chunk's shape, which the head puts there for the decoding rank."""


def stream_key(stream: int) -> str:
    """Exchange key of a decoder's state of one stream."""
    return f"decoder: stream {stream}"


@dataclass(frozen=True)
class Piece:
    """Pictures uint8 `[n, *P]` of one latent frame, P as in `streamdiff.video.pixel_format`; `last` of its chunk.
    `fault`: why there are none, and the stream cannot go on."""

    stream: int
    chunk: int
    pictures: NDArray[np.uint8]
    last: bool
    fault: str = ""

    @classmethod
    def failed(cls, stream: int, chunk: int, fault: str) -> Piece:
        """The final piece of a chunk that failed."""
        return cls(stream, chunk, np.empty(0, np.uint8), True, fault)


Deliver = Callable[[Piece], None]
SavedMemory = Callable[[], State | None]
"""Gives what a decoder remembers of a stream once, when it is there; None: not yet. From any thread."""


class Decoding(Protocol):
    """Decodes latents to pictures, which are delivered from a thread of its own."""

    _error: BaseException | None

    def submit(self, stream: int, chunk: int, latents: Tensor) -> None:
        """Decode latents `[C, F, h, w]`, the next chunk of a stream. Does not wait."""

    def forget(self, stream: int) -> None:
        """The stream has ended; what was submitted may still come out."""

    def save(self, stream: int) -> SavedMemory:
        """What the decoder remembers of a stream after all that was submitted. Does not wait."""

    def load(self, stream: int, state: State) -> None:
        """Let a stream that has not begun go on from what was saved. Raises ConfigError where it does not fit."""

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """What the decoder may remember of a stream of chunks `[C, F, h, w]`, see `memory_outlines`; waits for it."""

    def swap_out(self, stream: int) -> None:
        """Keep what the decoder remembers of a stream elsewhere, after all that was submitted, until `swap_in`."""

    def swap_in(self, stream: int) -> Outcome:
        """Have it remembered again, before what is submitted later. NOT_YET: call again; never waits."""

    def check(self) -> None:
        """Raises what has gone wrong on the way."""
        if self._error is not None:
            raise self._error

    def close(self, abandon: bool = False) -> None:
        """End the threads; what is not decoded is dropped. With `abandon` they are not waited for: the device that they
        wait for is stuck."""
