"""Through how many files and calls a step of the engine passes: two chunks of the embedded model, from `Engine.step`
down. Frames are those of the package; comprehensions and properties of others' libraries are not counted."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from streamdiff.config import ModelConfig
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import FrameBatch, Open, Shown
from streamdiff.pipeline.build import load_pipeline
from tests.rules.source import PACKAGE

pytestmark = pytest.mark.slow

FILES, DEPTH, DECISION = 25, 10, 2
"""At most: files, frames on the stack with `Engine.step` itself, calls from there to the scheduler's decision."""


class Trace:
    """A profiler of the thread that steps the engine."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, str]] = []
        self.files: set[str] = set()
        self.deepest: list[tuple[str, str]] = []
        self.to_decision: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(f"{PACKAGE}/") or code.co_name.startswith("<"):
            return
        if event == "return" and self.stack:
            self.stack.pop()
        elif event == "call":
            self.stack.append((code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname))
            if self.stack[0][1] == "Engine.step":
                self.files.add(self.stack[-1][0])
                self.deepest = max(self.deepest, list(self.stack), key=len)
                if self.stack[-1][1] == "StreamBatchScheduler.next":
                    self.to_decision = list(self.stack)


def play(engine: Engine, chunks: int) -> None:
    while chunks > 0:
        for event in engine.step(0.01):
            if isinstance(event, FrameBatch):
                engine.handle(Shown("one", event.first + len(event.pictures)))
                chunks -= event.chunk_s is not None


def test_a_step_passes_through_few_files_and_calls() -> None:
    engine, trace = Engine(load_pipeline(ModelConfig()), 100), Trace()
    engine.handle(Open("one", "a red ball"))
    play(engine, 3)
    sys.setprofile(trace)
    try:
        play(engine, 2)
    finally:
        sys.setprofile(None)
        engine.close()
    assert len(trace.files) <= FILES, sorted(trace.files)
    assert len(trace.deepest) <= DEPTH, trace.deepest
    assert 0 < len(trace.to_decision) - 1 <= DECISION, trace.to_decision
