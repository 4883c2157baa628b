"""Noise that a thread draws ahead is the noise that is drawn when it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.runner.noise import PrefetchedNoise, SeededNoise
from tests.pipeline.playing import THREE, play, same
from tests.small import CPU, small_model

PLAIN = SeededNoise((4, 2, 3, 3), seed=11)


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

    def is_unscaled(self, chunk: int) -> bool:
        return PLAIN.is_unscaled(chunk)


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
    thread.shutdown(wait=True)
    assert len(noise.draws) == len(set(noise.draws)), "something is drawn twice"
    assert noise.elsewhere >= len(order) - 2, "only a first step may have to be waited for"
    assert all(0 <= step < 4 for _, step in noise.draws)


def test_streams_with_noise_drawn_ahead_are_the_same_bit_for_bit(thread: ThreadPoolExecutor) -> None:
    model = small_model(4)
    plain, ahead = RingExecutor(model, CPU), RingExecutor(model, CPU)
    ahead.head._thread = thread
    expected, got = play(plain, model, THREE), play(ahead, model, THREE)
    assert all(isinstance(session.noise, PrefetchedNoise) for session in ahead.head.sessions.values())
    assert all(same(got[name], expected[name]) for name in THREE)
