"""What the engine needs of the pipeline it drives, as protocols:
`streamdiff.pipeline.streaming_pipeline.StreamingPipeline` fits them.

The engine is written against these, so it can be driven in a test by a pipeline that paints instead of computing, and
the same tests run on both. Imports neither torch nor the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Reading(Protocol):
    """How a prompt was understood; see `streamdiff.models.interfaces.Reading`."""

    @property
    def text(self) -> str: ...
    @property
    def notice(self) -> str: ...


class Text(Protocol):
    """Prompt to conditioning; see `streamdiff.models.interfaces.TextEncoder`. What `encode` returns is opaque here."""

    @property
    def examples(self) -> tuple[str, ...]: ...
    @property
    def vocabulary(self) -> str: ...
    @property
    def slow(self) -> bool: ...
    def read(self, prompt: str, previous: str | None) -> Reading: ...
    def encode(self, text: str) -> Any: ...


class Info(Protocol):
    """What a loaded model is. Sizes in pixels; `steps` and `kv_context` are those of a session that does not name its
    own, `steps_known` the numbers of steps that it may name, `switch` what a new prompt does to the past unless it
    says."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def native_fps(self) -> float: ...
    @property
    def chunk_frames(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def kv_context(self) -> str: ...
    @property
    def steps_known(self) -> tuple[int, ...]: ...
    @property
    def switch(self) -> str: ...


class Made(Protocol):
    """Decoded frames of one chunk, in order: `pictures` uint8 `[n, *P]`, P as in `streamdiff.video.pixel_format`.

    `last` is True on the last piece of a chunk, and `chunk_s` is then the seconds since the chunk's admission.
    """

    @property
    def session(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def pictures(self) -> NDArray[np.uint8]: ...
    @property
    def last(self) -> bool: ...
    @property
    def chunk_s(self) -> float | None: ...


class Pipeline(Protocol):
    """The ring, as seen from its head. `session` is a slot number, which the engine gives and uses again.

    Frames of a session come in order: chunks from 0, one epoch per chunk, epochs never going back. After `reset` and
    `close_session` no frames of before appear.
    """

    @property
    def info(self) -> Info: ...

    @property
    def text(self) -> Text: ...

    def minimum_lead(self, *, steps: int, kv_context: str) -> int:
        """Frames that a session's room must reach at least, or nothing is made. Raises ValueError as `open` does."""

    def open(self, session: int, conditioning: Any, *, seed: int, epoch: int, steps: int, kv_context: str) -> None:
        """Start a stream, with no room yet. Raises ValueError for steps or a KV context it cannot run."""

    def check_switch(self, session: int, switch: str) -> None:
        """Raise RequestError if an open session cannot have its prompt changed in this way."""

    def set_conditioning(self, session: int, conditioning: Any, *, epoch: int, switch: str = "keep") -> None:
        """Use `conditioning` from the next admitted chunk on, which sees the past as `switch` says."""

    def check_steps(self, session: int, steps: int) -> None:
        """Raise RequestError if an open session cannot go on in so many steps."""

    def set_steps(self, session: int, steps: int, *, epoch: int) -> None:
        """Make chunks in `steps` steps, and of `epoch`, from the next one on that is admitted after those in flight.
        Of several such changes that wait, the latest holds; it holds after a reset too."""

    def reset(self, session: int, conditioning: Any, *, seed: int, epoch: int) -> None:
        """Drop what is in flight and start afresh at chunk 0."""

    def set_paused(self, session: int, paused: bool) -> None:
        """While paused, admit no chunk."""

    def set_room(self, session: int, frames: int) -> None:
        """Let at most `frames` frames come beyond those that `step` has returned; what is in flight counts."""

    def close_session(self, session: int) -> None:
        """Free the session's state."""

    def step(self, wait_s: float = 0.0) -> Sequence[Made]:
        """Do one piece of work and return what is decoded; with nothing to do but wait for a decode, wait."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to wait for."""

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the EngineFailure that ends the pipeline, if there is one or comes within `wait_s`."""

    def occupancy(self) -> list[float]:
        """Share of the time that each stage has been busy since it was loaded; empty with one stage."""

    def busy_s(self) -> list[float]:
        """Seconds that each rank was at work since its process began; only ever more."""

    def work_s(self) -> float | None:
        """Seconds of work in a chunk in the default number of steps, as the latest ones tell, where the most work is
        done; None before the first."""

    def sessions_fit(self) -> int | None:
        """How many sessions of the default kind the memory holds; None: nobody counts."""

    def close(self) -> None:
        """Free everything."""
