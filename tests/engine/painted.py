"""A pipeline that paints instead of computing: what the engine calls of `StreamingPipeline`, deterministic, no torch.

A stream that begins with a picture shows it for a chunk; otherwise the top left pixel of a picture is (frame
number in the stream mod 256, seed mod 256, checksum of the text mod 256).
Run as a module it is an engine process like the real one. Texts that begin with `fail` make it raise, as named there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from streamdiff.config import ModelConfig
from streamdiff.core import PROMPT_POLICIES, Frames, ModelInfo
from streamdiff.engine.messages import Pictures
from streamdiff.engine.process.main import main
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.spec import ParsedPrompt
from streamdiff.pipeline.scheduler.row_limit import ForwardCounts
from tests.engine.bare_pipeline import BarePipeline

SIZE = 16
CHUNK_FRAMES = 6
PIECE_FRAMES = 2
WORDS = ("red", "green", "blue", "circle", "star", "left", "right")


def checksum(text: str) -> int:
    return crc32(text.encode()) % 256


INFO = ModelInfo("painted", "cpu", SIZE, SIZE, 20.0, CHUNK_FRAMES, 2, "clean", (2, 4))


class PaintedText:
    examples: tuple[str, ...] = ("red circle left", "blue star")
    suggestions = (("red", "blue"),)
    vocabulary = "colours, shapes, ways"
    slow = False

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        if prompt == "refuse me":
            raise RequestError("prompt", "the painter refuses this prompt")
        unknown = [word for word in prompt.split() if word not in WORDS]
        return ParsedPrompt(prompt.strip(), f"I do not know {', '.join(unknown)}" if unknown else "")

    def encode(self, text: str) -> str:
        return text


@dataclass
class _Stream:
    text: str
    seed: int
    epoch: int
    steps: int
    kv_context: str
    chunk: int = 0
    room: int = 0
    paused: bool = False
    in_flight: tuple[int, int, str] | None = None  # chunk, epoch, text
    steps_left: int = 0
    decoded: deque[Frames] = field(default_factory=deque)
    start: Pictures | None = None

    @property
    def ready(self) -> bool:
        waiting = sum(len(piece.pictures) for piece in self.decoded)
        admits = not self.paused and self.room - waiting >= CHUNK_FRAMES
        return self.in_flight is not None or admits


class PaintedPipeline(BarePipeline):
    info = INFO

    def __init__(self) -> None:
        self.text = PaintedText()
        self.streams: dict[int, _Stream] = {}
        self.calls: list[tuple[object, ...]] = []
        self.closed = False
        self.on_fault: Callable[[int, str], None]

    def min_ahead_frames(self, *, steps: int, kv_context: str) -> int:
        if kv_context not in ("clean", "staircase", "same_step"):
            raise ValueError(f"kv_context is {kv_context!r}; it must be clean, staircase or same_step")
        return CHUNK_FRAMES

    def open(
        self,
        session: int,
        conditioning: object,
        *,
        seed: int,
        epoch: int,
        steps: int,
        kv_context: str,
        background: bool = False,
        start: Pictures | None = None,
        video: object = None,
    ) -> None:
        assert isinstance(conditioning, str) and session not in self.streams and video is None
        if steps not in (2, 4):
            raise RequestError("steps", f"steps is {steps}; it must be 2 or 4")
        self.streams[session] = _Stream(conditioning, seed, epoch, steps, kv_context, start=start)
        self.calls.append(("open", session, conditioning, steps, kv_context))

    def encode_picture(self, picture: Pictures) -> Pictures:
        if (picture == 13).all():
            raise ConfigError("the painter cannot look at this")
        return picture

    def check_switch(self, session: int, switch: str) -> None:
        known = ("keep", "flush", "reset") if self.streams[session].kv_context == "same_step" else PROMPT_POLICIES
        if switch not in known:
            raise RequestError("switch", f"the painter cannot {switch}")

    def set_conditioning(self, session: int, conditioning: object, *, epoch: int, switch: str = "keep") -> None:
        assert isinstance(conditioning, str)
        stream = self.streams[session]
        stream.text, stream.epoch = conditioning, epoch
        self.calls.append(("set_conditioning", session, conditioning, epoch, switch))

    def check_steps(self, session: int, steps: int) -> None:
        assert session in self.streams
        if steps not in self.info.steps_known:
            raise RequestError("steps", f"steps is {steps}; the painter has 2, 4")

    def set_steps(self, session: int, steps: int, *, epoch: int) -> None:
        stream = self.streams[session]
        stream.steps, stream.epoch = steps, epoch  # of the chunk in flight the steps left stay
        self.calls.append(("set_steps", session, steps, epoch))

    def reset(
        self, session: int, conditioning: object, *, seed: int, epoch: int, start: Pictures | None = None
    ) -> None:
        assert isinstance(conditioning, str)
        stream = self.streams[session]
        self.streams[session] = _Stream(conditioning, seed, epoch, stream.steps, stream.kv_context, start=start)
        self.calls.append(("reset", session, conditioning, seed, epoch))

    def set_paused(self, session: int, paused: bool) -> None:
        self.streams[session].paused = paused
        self.calls.append(("set_paused", session, paused))

    def set_frame_credit(self, session: int, frames: int) -> None:
        assert frames >= 0
        self.streams[session].room = frames

    def close_session(self, session: int) -> None:
        del self.streams[session]
        self.calls.append(("close_session", session))

    @property
    def busy(self) -> bool:
        return any(stream.ready or stream.decoded for stream in self.streams.values())

    def collect(self, wait_s: float) -> list[Frames]:
        for slot, stream in self.streams.items():
            if not stream.ready:
                continue
            if stream.in_flight is None:
                stream.in_flight = (stream.chunk, stream.epoch, stream.text)
                stream.steps_left = stream.steps
                stream.chunk += 1
            stream.steps_left -= 1
            if stream.steps_left == 0:
                self._fail_if_asked(stream.in_flight[2])
                stream.decoded.extend(self._paint(slot, stream))
                stream.in_flight = None
            self.streams[slot] = self.streams.pop(slot)  # the others are next
            break
        pieces = []
        for stream in self.streams.values():
            if stream.decoded:
                piece = stream.decoded.popleft()
                stream.room -= len(piece.pictures)
                pieces.append(piece)
        return pieces

    def _paint(self, slot: int, stream: _Stream) -> list[Frames]:
        assert stream.in_flight is not None
        chunk, epoch, text = stream.in_flight
        pieces = []
        for start in range(0, CHUNK_FRAMES, PIECE_FRAMES):
            numbers = chunk * CHUNK_FRAMES + start + np.arange(PIECE_FRAMES)
            pictures = np.zeros((PIECE_FRAMES, SIZE, SIZE, 3), np.uint8)
            pictures[..., 0] = (numbers % 256)[:, None, None]
            pictures[..., 1] = stream.seed % 256
            pictures[..., 2] = checksum(text)
            if chunk == 0 and stream.start is not None:
                pictures[:] = stream.start
            last = start + PIECE_FRAMES == CHUNK_FRAMES
            pieces.append(Frames(slot, chunk, epoch, pictures, last, 0.01 if last else None))
        return pieces

    def _fail_if_asked(self, text: str) -> None:
        if text == "fail raise":
            raise ArithmeticError("the paint ran out")
        if text == "fail exit":
            print("about to leave without a word", file=sys.stderr)
            os._exit(7)
        if text == "fail hang":
            print("hanging", file=sys.stderr, flush=True)
            time.sleep(3600)

    def check(self, wait_s: float = 0.0) -> None:
        """A painter is always well."""

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

    def close(self) -> None:
        self.streams.clear()
        self.closed = True

    def take_done(self) -> list[tuple[int, object]]:
        return []


def load(config: ModelConfig) -> PaintedPipeline:
    if config.name == "unknown":
        raise ConfigError("there is no model 'unknown'; use 'tiny' or a folder")
    if config.name == "broken":
        raise ArithmeticError("the weights are sour")
    if config.name == "slow":
        print("compiling: 0/2\rcompiling: 1/2\nstill loading", file=sys.stderr)
        time.sleep(3600)
    if config.name.startswith("patient "):  # loads until the file of this name is there, and says so all the time
        while not os.path.exists(config.name.removeprefix("patient ")):
            print("still loading", file=sys.stderr)
            time.sleep(0.02)
    logging.getLogger("streamdiff.painted").info("settings of the start")
    return PaintedPipeline()


if __name__ == "__main__":
    sys.exit(main(load=load))
