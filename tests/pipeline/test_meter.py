"""What a chunk costs, read from turns and shares; and that the runtime measures itself."""

from __future__ import annotations

import pytest

from streamdiff.config import ModelConfig
from streamdiff.pipeline.meter import Meter
from streamdiff.pipeline.start import load_runtime


def test_time_with_nothing_to_do_costs_nothing() -> None:
    meter = Meter()
    assert meter.work_s(None, 0.0) is None
    meter.turn(0.0, True, [])
    meter.turn(0.25, True, [])
    meter.turn(0.5, False, [1])  # half a second of work
    meter.turn(60.0, True, [])  # a minute of waiting for viewers
    meter.turn(61.0, False, [1, 1])  # two sessions' chunks in a second
    assert meter.work_s(None, 61.0) == pytest.approx((0.5 + 0.5 + 0.5) / 3)


def test_chunks_in_other_numbers_of_steps_count_as_what_they_are() -> None:
    """Two passes a second: a chunk in 4 steps has five and takes 2.5 s, one in 2 steps three and takes 1.5 s."""
    usual, fewer = Meter(), Meter()
    for turn in range(8):
        usual.turn(turn * 2.5, True, [1] if turn else [])
        fewer.turn(turn * 1.5, True, [3 / 5] if turn else [])
    assert usual.work_s(None, 0.0) == pytest.approx(fewer.work_s(None, 0.0)) == pytest.approx(2.5)
    assert usual.work_s(1.0, 7 * 2.5) == pytest.approx(fewer.work_s(1.0, 7 * 1.5)) == pytest.approx(2.5)


def test_the_latest_chunks_count() -> None:
    meter = Meter()
    for turn in range(100):
        meter.turn(turn * 1.0 if turn < 50 else 50 + (turn - 50) * 0.1, True, [1])
    assert meter.work_s(None, 0.0) == pytest.approx(0.1, rel=0.01)


def test_in_a_ring_the_busiest_rank_decides_once_it_has_done_something() -> None:
    meter = Meter()
    for turn in range(5):
        meter.turn(turn * 1.0, True, [1] if turn else [])
        waits = meter.work_s(0.5, turn * 1.0)
        assert turn == 0 or waits == pytest.approx(1.0 if turn < 4 else 0.5)


def test_the_runtime_knows_after_warming_up_what_a_chunk_takes() -> None:
    runtime = load_runtime(ModelConfig())
    work_s, fits = runtime.work_s(), runtime.sessions_fit()
    assert work_s is not None and work_s > 0
    assert fits is not None and fits >= 1
    runtime.close()
