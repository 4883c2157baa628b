"""The one stand-in for a pipeline: what the engine calls of `StreamingPipeline`, without torch, swapping and video.

`tests.engine.painted` makes frames of it that can be counted, `tests.server.scripted` frames that can be looked at.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from streamdiff.core import PROMPT_POLICIES, Frames, ModelInfo, control_values
from streamdiff.engine.messages import Pictures
from streamdiff.errors import ConfigError, RequestError
from streamdiff.pipeline.scheduler.row_limit import ForwardCounts


@dataclass
class FakeStream:
    """`paint` is its text's conditioning, `credit` the frames that may be made; `switch` what the last prompt did to
    the past. `in_flight` and `decoded` are for pipelines that make a chunk in steps and pieces."""

    paint: Any
    seed: int
    epoch: int
    steps: int
    kv_context: str
    start: Pictures | None = None
    video: list[tuple[int, ...]] = field(default_factory=list)
    background: bool = False
    chunk: int = 0
    wait_at: int | None = None
    credit: int = 0
    paused: bool = False
    switch: str = "keep"
    held: dict[str, float] = field(default_factory=dict)
    changes: int = 0

    @property
    def waits(self) -> bool:
        """Whether a change has to come before the next chunk."""
        return self.wait_at is not None and self.chunk >= self.wait_at

    in_flight: tuple[int, int, Any] | None = None  # chunk, epoch, paint
    steps_left: int = 0
    decoded: deque[Frames] = field(default_factory=deque)


def _no_lora(name: str) -> None:
    raise RequestError("lora", f"there is no LoRA {name!r}: the painter has none")


class FakePipeline:
    """Keeps what it was asked for; how frames are made (`busy`, `collect`) is up to subclasses."""

    info: ModelInfo
    text: Any
    loras: Any = SimpleNamespace(names=(), read=_no_lora)
    sampler = SimpleNamespace(sessions=defaultdict(lambda: SimpleNamespace(latest_loras={})))
    encodings = 0
    inputs: tuple[int, ...] = ()
    savings: tuple[int, ...] = ()
    away: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.streams: dict[int, FakeStream] = {}
        self.calls: list[tuple[object, ...]] = []
        self.closed = False
        self.on_fault: Callable[[int, str], None] = lambda session, why: None

    @property
    def resting(self) -> Any:
        """The fake is its own collaborators."""
        return self

    video = figures = resting

    def min_ahead_frames(self, *, steps: int, kv_context: str) -> int:
        if kv_context not in ("clean", "staircase", "same_step"):
            raise ValueError(f"kv_context is {kv_context!r}; it must be clean, staircase or same_step")
        return 2 * self.info.chunk_frames

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
        start: Pictures | None = None,
        video: list[tuple[int, ...]] | None = None,
    ) -> None:
        assert session not in self.streams
        self._check_steps(steps)
        self.streams[session] = FakeStream(conditioning, seed, epoch, steps, kv_context, start, video or [], background)
        self.calls.append(("open", session, conditioning, steps, kv_context))

    def image_features(self, picture: Pictures) -> None:
        """It takes prompts."""

    def encode_picture(self, picture: Pictures) -> Pictures:
        return picture

    def check_switch(self, session: int, switch: str) -> None:
        known = ("keep", "flush", "reset") if self.streams[session].kv_context == "same_step" else PROMPT_POLICIES
        if switch not in known:
            raise RequestError("switch", f"the painter cannot {switch}")

    def loras_of(self, session: int) -> set[int]:
        return set()

    def set_conditioning(
        self, session: int, conditioning: Any, *, epoch: int, switch: str = "keep", loras: Any = None
    ) -> None:
        stream = self.streams[session]
        stream.paint, stream.epoch, stream.switch = conditioning, epoch, switch
        self.calls.append(("set_conditioning", session, conditioning, epoch, switch))

    def next_chunk(self, session: int) -> int:
        return self.streams[session].chunk

    def wait_at(self, session: int, chunk: int | None) -> None:
        self.streams[session].wait_at = chunk

    def reruns(self, session: int) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        return {"name": self.info.model, "weights": ["painted"]}

    def check_facts(self, theirs: Mapping[str, Any] | None) -> None:
        if theirs not in (None, self.facts()):
            raise ConfigError("the log is of another hand", field="weights", code="weights")

    def blended(self, before: Any, after: Any, share: float, along: str) -> Any:
        return tuple(round((1 - share) * one + share * other) for one, other in zip(before, after, strict=True))

    def set_controls(self, session: int, values: Mapping[str, float], pressed: bool = True) -> int:
        control_values(self.info.controls, values)
        stream = self.streams[session]
        stream.held |= values
        stream.changes += 1
        self.calls.append(("set_controls", session, dict(values)))
        return stream.changes

    def check_steps(self, session: int, steps: int) -> None:
        assert session in self.streams
        self._check_steps(steps)

    def _check_steps(self, steps: int) -> None:
        if steps not in self.info.steps_known:
            raise RequestError("steps", f"steps is {steps}; the painter has {self.info.steps_known}")

    def set_steps(self, session: int, steps: int, *, epoch: int) -> None:
        self.streams[session].steps, self.streams[session].epoch = steps, epoch  # a chunk in flight keeps its own
        self.calls.append(("set_steps", session, steps, epoch))

    def reset(
        self,
        session: int,
        conditioning: Any,
        *,
        seed: int,
        epoch: int,
        start: Pictures | None = None,
        loras: Any = None,
    ) -> None:
        old = self.streams[session]
        new = FakeStream(conditioning, seed, epoch, old.steps, old.kv_context, start, old.video, switch="reset")
        new.credit, new.paused = old.credit, old.paused
        self.streams[session] = new
        self.calls.append(("reset", session, conditioning, seed, epoch))

    def set_paused(self, session: int, paused: bool) -> None:
        self.streams[session].paused = paused
        self.calls.append(("set_paused", session, paused))

    def set_frame_credit(self, session: int, frames: int) -> None:
        assert frames >= 0
        self.streams[session].credit = frames

    def close_session(self, session: int) -> None:
        del self.streams[session]
        self.calls.append(("close_session", session))

    def close(self) -> None:
        self.streams.clear()
        self.closed = True

    # ---- a step: all is done in `collect` ------------------------------------------------------------------------

    def attend(self) -> None: ...

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def schedule(self) -> None: ...

    def run(self, message: None) -> None: ...

    def sample(self) -> list[Any]:
        return []

    def decode(self, message: None, finished: list[Any]) -> None: ...

    def check(self, wait_s: float = 0.0) -> None: ...

    # ---- figures -------------------------------------------------------------------------------------------------

    def occupancy(self) -> list[float]:
        return []

    def forwards(self) -> ForwardCounts:
        return ForwardCounts()

    def busy_s(self) -> list[float]:
        return [0.0]

    def chunk_compute_s(self) -> float | None:
        return None

    def max_sessions(self) -> int | None:
        return None

    def max_swapped_sessions(self) -> int | None:
        return 0

    def memory_bytes(self) -> int:
        return 3 << 20

    # ---- no video, no swapping, nothing saved ----------------------------------------------------------------------

    def check_input(self, strength: float | None) -> None:
        raise RequestError("input", f"{self.info.model} takes no video; steer it by its prompt alone")

    def let_go(self, session: int) -> None: ...

    def nbytes(self, session: int) -> int:
        return 0

    def is_away(self, session: int) -> bool:
        return False

    def can_swap_out(self, session: int, returning: int | None = None) -> bool:
        return False

    def at_rest(self, session: int) -> bool:
        return False

    def place(self, session: int) -> str:
        return "device"

    def take_done(self) -> list[tuple[int, Any]]:
        return []
