"""The pipeline as the engine drives it: a protocol, which
`streamdiff.pipeline.streaming_pipeline.StreamingPipeline` implements.

The engine is written against it, so it can be driven in a test by a pipeline that paints instead of computing, and the
same tests run on both. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamdiff.engine.messages import Data
from streamdiff.models.spec import TextEncoder
from streamdiff.pipeline.output import Frames, InputFigures, ModelInfo
from streamdiff.pipeline.scheduler.row_limit import ForwardCounts


class Pipeline(Protocol):
    """Runs sessions. `session` is a slot number, which the engine assigns and reuses.

    Frames of a session come in order: chunks from 0, one epoch per chunk, epochs never going back. After `reset` and
    `close_session` no frames of before appear.
    """

    info: ModelInfo
    text: TextEncoder
    on_fault: Callable[[int, str], None]
    """Called within `step`, `save` and `load` with a session that has failed by itself, and why. It makes nothing more,
    and is still to be closed; the others go on."""

    def min_ahead_frames(self, *, steps: int, kv_context: str) -> int:
        """Frames that must be allowed ahead of those shown, at least. Raises ValueError as `open` does."""

    def open(
        self,
        session: int,
        conditioning: Any,
        *,
        seed: int,
        epoch: int,
        steps: int,
        kv_context: str,
        background: bool = False,
        start: Any = None,
        video: Any = None,
    ) -> None:
        """Start a stream, with a frame credit of 0; with `background` it takes what others leave. `start`, of
        `encode_picture`, is shown first, and the stream goes on from it; of `video`, of `video_of`, each chunk starts
        from its own. Raises ValueError for steps or a KV context it cannot run."""

    def encode_picture(self, picture: NDArray[np.uint8]) -> Any:
        """A start picture, RGB `[H, W, 3]` of the model's size, as `open` and `reset` take it. Called on a thread of
        its own, while streams go on. Raises StreamdiffError where the model encodes none."""

    def check_switch(self, session: int, switch: str) -> None:
        """Raise RequestError if an open session cannot have its prompt changed in this way."""

    def set_conditioning(self, session: int, conditioning: Any, *, epoch: int, switch: str = "keep") -> None:
        """Use `conditioning` from the next admitted chunk on, which sees the past as `switch` says."""

    def check_steps(self, session: int, steps: int) -> None:
        """Raise RequestError if an open session cannot go on in so many steps."""

    def set_steps(self, session: int, steps: int, *, epoch: int) -> None:
        """Make chunks in `steps` steps, and of `epoch`, from the next one on that is admitted after those in flight.
        Of several such changes that wait, the latest holds; it holds after a reset too."""

    def reset(self, session: int, conditioning: Any, *, seed: int, epoch: int, start: Any = None) -> None:
        """Drop chunks in flight and restart at chunk 0; `start` as in `open`."""

    def set_paused(self, session: int, paused: bool) -> None:
        """While paused, admit no chunk."""

    def set_frame_credit(self, session: int, frames: int) -> None:
        """Let at most `frames` frames come beyond those that `step` has returned; what is in flight counts."""

    def close_session(self, session: int) -> None:
        """Free the session's state."""

    def step(self, wait_s: float = 0.0) -> Sequence[Frames]:
        """Do one piece of work; returns the frames decoded by now. Waits up to `wait_s` if only decoding is pending."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to wait for."""

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the EngineFailure that ends the pipeline, if there is one or comes within `wait_s`."""

    def occupancy(self) -> list[float]:
        """Share of the time that each rank has been busy since it was loaded; empty with one rank."""

    def busy_s(self) -> list[float]:
        """Seconds that each rank was at work since its process began; only ever more."""

    def forwards(self) -> ForwardCounts:
        """Forwards so far, by their rows, and why rows went alone."""

    def work_s(self) -> float | None:
        """Seconds of work in a chunk of the default number of steps, averaged over the latest chunks, of the rank with
        the most work; None before the first chunk."""

    def memory_bytes(self) -> int:
        """Bytes that this process has taken of its GPU, or without one of the machine's memory."""

    def sessions_fit(self) -> int | None:
        """How many sessions with default settings fit in memory; None: unknown."""

    def close(self) -> None:
        """Free everything."""

    # ---- saving sessions, and resuming them elsewhere

    def save(self, session: int) -> tuple[Any, Sequence[Frames]]:
        """A `pipeline.snapshot.file.Snapshot` of an open session, and frames that came before it was taken. Raises
        ConfigError for one that cannot be saved."""

    def comes_to_rest(self, session: int) -> bool:
        """Hold a session; whether `begin_save` may be called."""

    def begin_save(self, session: int, finish: Callable[[Any], Any]) -> int:
        """Begin to save it as it is now; `finish` is called with the snapshot, on a thread. Returns a ticket. Raises
        ConfigError for one that cannot be saved, which goes on."""

    def take_saved(self) -> list[tuple[int, Any]]:
        """Results of `finish`, or a ConfigError, with their tickets. Each is returned once."""

    def read_snapshot(self, data: Data) -> Any:
        """The snapshot in a file's content. Raises ConfigError for what is none."""

    def load(self, session: int, snapshot: Any) -> Sequence[Frames]:
        """Open a stream that goes on from a snapshot; returns frames that came meanwhile. Raises RequestError for one
        that does not fit."""

    # ---- beginning with embeddings or latents that were made elsewhere; called from any thread

    def conditioning_of(self, rows: NDArray[np.float32]) -> Any:
        """A prompt's embeddings `[L, D]`, as `open` takes a text's."""

    def start_of(self, latents: NDArray[np.float32]) -> Any:
        """Latents `[n, C, F, h, w]` of the stream's first chunks, as `open` takes a picture's."""

    def video_of(self, latents: NDArray[np.float32], strength: float, motion: NDArray[np.float64] | None) -> Any:
        """Latents `[n, C, F, h, w]` that chunks start from, as `open` takes them; `motion` `[n]` is how far
        the pixels of each move, None if unknown."""

    # ---- live video

    def check_input(self, strength: float | None) -> None:
        """Raises RequestError for what `set_input` cannot do."""

    def set_input(self, session: int, strength: float | None, *, epoch: int) -> None:
        """Let chunks start from what `feed` brings, with noise of level `strength`; None: not any more. Chunks admitted
        from now on are of `epoch`."""

    def feed(self, session: int, frames: NDArray[np.uint8]) -> None:
        """The next frames `[n, H, W, 3]`; nothing happens without an input."""

    def input_figures(self, session: int) -> InputFigures | None:
        """How the input does; None: there never was one."""

    video_encodings: int
    """Pieces of video that were encoded since its process began."""

    # ---- swapping sessions out of device memory and in again

    def sessions_away(self) -> int | None:
        """How many sessions with default settings may be swapped out; None: no limit."""

    def at_rest(self, session: int) -> bool:
        """Whether no chunk of a session is in flight or may be admitted."""

    def can_swap_out(self, session: int, returning: int | None = None) -> bool:
        """Whether host memory or disk has room for it once `returning` is back."""

    def swap_out(self, session: int) -> None:
        """Free its device memory; no chunk of it is made until it is swapped in."""

    def swap_in(self, session: int) -> None:
        """Swap it in. Raises RequestError, code "memory", where device memory is too short now."""

    def is_away(self, session: int) -> bool:
        """Whether it is swapped out, or still being swapped in."""

    def place(self, session: int) -> str:
        """Where its caches are: `device`, `host` (memory) or `disk`."""

    def take_lost(self) -> list[int]:
        """Sessions that were swapped in without their caches; `reset` is to follow. Each is returned once."""
