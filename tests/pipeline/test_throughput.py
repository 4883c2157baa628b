"""What a chunk costs, read from turns and shares; and that the runtime measures itself."""

from __future__ import annotations

import pytest

from streamdiff.pipeline.throughput import ChunkCostMeter


def test_time_with_nothing_to_do_costs_nothing() -> None:
    meter = ChunkCostMeter(0.0, [7.0])  # warming up
    assert meter.chunk_compute_s() is None
    meter.finished(0.5, [7.5], [1])  # half a second of work
    assert meter.chunk_compute_s() == pytest.approx(0.5)
    meter.finished(61.0, [8.5], [1, 1])  # a minute of waiting for viewers, then two sessions' chunks in a second
    assert meter.chunk_compute_s() == pytest.approx(0.5)


def test_chunks_in_other_numbers_of_steps_count_as_what_they_are() -> None:
    """Two passes a second: a chunk in 4 steps has five and takes 2.5 s, one in 2 steps three and takes 1.5 s."""
    usual, fewer = ChunkCostMeter(0.0, [0.0]), ChunkCostMeter(0.0, [0.0])
    for number in range(1, 8):
        usual.finished(number * 2.5, [number * 2.5], [1])
        fewer.finished(number * 1.5, [number * 1.5], [3 / 5])
    assert usual.chunk_compute_s() == pytest.approx(2.5) == fewer.chunk_compute_s()


@pytest.mark.parametrize("pace_s", [0.1, 1.0, 12.0], ids=["many chunks", "some", "one at a time"])
def test_a_busy_moment_is_forgotten(pace_s: float) -> None:
    """Chunks that took a second, and then, when the machine was left alone, chunks of a tenth."""
    meter = ChunkCostMeter(0.0, [0.0])
    for number in range(1, 11):
        meter.finished(number * 1.0, [number * 1.0], [1])
    assert meter.chunk_compute_s() == pytest.approx(1.0)
    for number in range(1, 600):
        meter.finished(10 + number * pace_s, [10 + number * 0.1], [1])
        if number * pace_s > 31 and number >= 5:
            break
    assert meter.chunk_compute_s() == pytest.approx(0.1, rel=0.2)


def test_in_a_ring_the_busiest_rank_decides() -> None:
    meter = ChunkCostMeter(0.0, [0.0, 0.0])
    meter.finished(1.0, [0.0, 0.0], [1])
    assert meter.chunk_compute_s() is None, "no rank has told yet that it worked"
    for number in range(2, 20):
        meter.finished(number * 1.0, [number * 0.1, number * 0.5], [1])
    assert meter.chunk_compute_s() == pytest.approx(0.5)
