"""Noise that a thread draws ahead is the noise that is drawn when it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from streamdiff.core import KV_CONTEXTS
from streamdiff.pipeline.runner.init_latents import InitLatents
from streamdiff.pipeline.runner.sampler import Noise, PrefetchedNoise, StreamInputs
from tests.pipeline.playing import local_ring
from tests.small import CPU, RED, small_model

PLAIN = Noise((4, 2, 3, 3), seed=11)


class Counted:
    """Counts draws, and those on another thread."""

    def __init__(self) -> None:
        self.draws: list[tuple[int, int]] = []
        self.elsewhere = 0
        self._here = threading.get_ident()

    def draw(self, chunk: int, step: int) -> torch.Tensor:
        self.draws.append((chunk, step))
        self.elsewhere += threading.get_ident() != self._here
        return PLAIN.draw(chunk, step)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize(
    "order",
    [
        [(chunk, step) for chunk in range(5) for step in range(4)],
        [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0), (0, 3), (1, 2), (2, 1), (3, 0)],
        [(7, 0), (7, 1), (3, 2), (3, 3)],
    ],
    ids=["in order", "several chunks in flight", "from the middle"],
)
def test_the_same_noise_in_any_order_and_drawn_once(order: list[tuple[int, int]], thread: ThreadPoolExecutor) -> None:
    noise = Counted()
    ahead = PrefetchedNoise(noise, CPU, 4, thread)
    for chunk, step in order:
        assert torch.equal(ahead.draw(chunk, step), PLAIN.draw(chunk, step))
        ahead.prefetch(chunk, step + 1)
        if step == 0:
            ahead.prefetch(chunk + 1, 0, 1)
    thread.shutdown(wait=True)
    assert len(noise.draws) == len(set(noise.draws)), "something is drawn twice"
    assert noise.elsewhere >= len(order) - 2, "only a first step may have to be waited for"
    assert all(0 <= step < 4 for _, step in noise.draws)


@pytest.mark.slow
@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
def test_what_a_micro_step_needs_is_ready_before_it_can_enter(
    kv_context: str, video: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a result that has come back and the micro-step that it lets in, no noise is drawn and no timestep
    embedded."""
    model = small_model(4, sink=1)
    late: list[str] = []
    here, hurried = threading.get_ident(), False

    def hurry(name: str) -> None:
        plain = getattr(ring.sampler, name)

        def call(*given: Any) -> Any:
            nonlocal hurried
            hurried = True
            made = plain(*given)
            hurried = False
            return made

        monkeypatch.setattr(ring.sampler, name, call)

    class Watched(Noise):
        def draw(self, chunk: int, step: int) -> torch.Tensor:
            late.extend([f"noise of chunk {chunk}, step {step}"] * (hurried and threading.get_ident() == here))
            return super().draw(chunk, step)

    embed = model.denoiser.time_embedding

    def embedding(timestep: torch.Tensor) -> torch.Tensor:
        late.extend(["a timestep"] * hurried)
        return embed(timestep)

    monkeypatch.setattr(model.denoiser, "time_embedding", embedding)
    ring = local_ring(model, CPU, 2)
    hurry("inputs")
    hurry("advance")
    source = InitLatents.steady(torch.zeros(9, *model.spec.chunk_shape), 0.8, 700.0) if video else None
    noise = Watched(model.spec.chunk_shape, 3)
    ring.open(0, model.text.encode(RED), epoch=0, steps=4, kv_context=kv_context, given=StreamInputs(noise, source))
    made = 0
    while made < 6:
        ring.scheduler.set_frame_credit(0, 6 * model.spec.chunk_frames)
        made += len(ring.step_latents()[1])
    assert not late
