"""What a runtime makes before anybody watches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamdiff.config import ModelConfig
from streamdiff.pipeline import build
from tests.small import small_model

MODEL = small_model(3, sink=2)  # a window of three chunks


class Recording:
    """A runtime on `device` of which a chunk comes out with each step."""

    def __init__(self, device: str) -> None:
        self.model, self.text = MODEL, SimpleNamespace(examples=[""], read=lambda *_: _Read(), encode=lambda text: None)
        self.info = SimpleNamespace(steps=4, chunk_frames=MODEL.spec.chunk_frames)
        self.stage, self.has_work = SimpleNamespace(device=torch.device(device)), False
        self.opened: list[str] = []
        self.chunks = 0
        self.measured: list[int] = []
        self.figures = SimpleNamespace(measure_from_here=self._measure, measure_to_here=self._measure)

    def open(self, session: int, conditioning: Any, *, kv_context: str, **more: Any) -> None:
        self.opened.append(kv_context)

    def step(self, wait_s: float) -> list[SimpleNamespace]:
        self.chunks += 1
        return [SimpleNamespace(last=True)]

    def _measure(self) -> None:
        self.measured.append(self.chunks)

    def set_frame_credit(self, session: int, frames: int) -> None: ...

    def close_session(self, session: int) -> None: ...


class _Read:
    text = ""


@pytest.mark.parametrize(
    ("device", "compiled", "context", "before"),
    [
        ("cpu", "off", "clean", 1),
        ("cpu", "on", "staircase", 3),
        ("cuda", "on", "staircase", 3),
        ("cuda", "off", "staircase", 3),
    ],
)
def test_on_cuda_and_with_graphs_a_whole_window_is_made_before_anybody_watches(
    device: str, compiled: str, context: str, before: int
) -> None:
    """There a length of the window that is met for the first time takes its time."""
    runtime = Recording(device)
    config = ModelConfig.model_validate({"kv_context": "staircase", "compile": compiled})
    build._warm_up(runtime, config)  # type: ignore[arg-type]
    assert runtime.opened == [context]
    assert runtime.measured == [before, before + 3]
