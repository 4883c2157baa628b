"""What the drift of stages' times would be worth is computed; a short run of real processes gives what it needs."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from benchmarks.stage_drift import Plan, Timing, best_split, compare, moved_blocks, results_of, run_ring, windows_of
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.model_sizes import read_sizes


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_every_stage_of_a_ring_keeps_what_its_forwards_take() -> None:
    """Five forwards a chunk: of all chunks but those on the way when it ended."""
    stages = run_ring(Plan(seconds=3, warm_up_s=0))
    chunks = [Counter((each.session, each.chunk) for each in own) for own in stages]
    assert chunks[0] == chunks[1] and set(chunks[0].values()) <= {1, 2, 3, 4, 5}
    assert chunks[0][0, 0] == 5
    assert all(each.seconds > 0 for own in stages for each in own)


def test_what_is_written_says_cost_and_gain() -> None:
    """The second of two stages takes three times as long from the third window on."""
    plan = Plan(seconds=60, window_s=10, warm_up_s=0)
    stages = [
        [Timing(float(at), 0, at, 0.1 if not slow or at < 20 else 0.3) for at in range(61)] for slow in (False, True)
    ]
    results, words = results_of(stages, plan, read_sizes("tiny"), 1.0)
    first, second = cast(list[dict[str, float]], results["stages"])
    assert (first["drift"], second["drift"]) == (0, pytest.approx(2))
    found = cast(dict[str, float], results["of_the_slowest_stage"])
    assert found["moves"] == 1 and found["moved_blocks"] == 2
    assert results["copying_s"] == pytest.approx(2 * cast(int, results["block_bytes"]) / 1e9)
    assert cast(float, results["gain"]) > 0.2 and "with 1 moves of blocks" in words
    with pytest.raises(ConfigError, match="there are 2 windows with chunks of all stages; 3 are needed"):
        results_of(stages, Plan(seconds=20, window_s=10, warm_up_s=0), read_sizes("tiny"), 1.0)


def test_windows_have_the_median_of_their_chunks() -> None:
    """Two forwards a chunk, a chunk a second; the second stage begins later, and its third window is slow."""
    plan = Plan(seconds=6, window_s=2, warm_up_s=1)
    stages = [
        [Timing(begin + at + half, 0, at, 0.1 * (at + 1) if slow else 0.1) for at in range(9) for half in (0, 0.5)]
        for begin, slow in ((0.0, False), (0.5, True))
    ]
    assert [[pytest.approx(0.1), pytest.approx(each)] for each in (0.25, 0.45, 0.65)] == windows_of(stages, plan)


def test_a_ring_that_moves_gains_what_lasts_and_pays_for_what_does_not() -> None:
    """Eight blocks, two ranks; from the third window on the second takes three times as long, or in every other."""
    even, slow = [0.4, 0.4], [0.4, 1.2]
    lasting = compare([even, even, *[slow] * 5], 8, 0.05)
    assert (lasting.moves, lasting.moved_blocks) == (1, 2)
    assert lasting.foreseen_s < lasting.moving_s < lasting.kept_s
    assert lasting.kept_s == pytest.approx((0.4 + 5 * 1.2) / 6)
    assert lasting.moving_s == pytest.approx((0.4 + 1.2 + 4 * 0.6) / 6)
    passing = compare([even, slow] * 4, 8, 0.05)
    assert passing.moves == 6 and passing.moving_s > passing.kept_s, "what was slow then is not now"
    assert compare([even, [0.4, 0.41]] * 4, 8, 0.05).moves == 0


def test_the_planners_split_by_how_slow_ranks_are() -> None:
    assert best_split(8, [0.1, 0.1]) == ((0, 4), (4, 8))
    assert best_split(8, [0.1, 0.3]) == ((0, 6), (6, 8))
    assert moved_blocks(((0, 4), (4, 8)), ((0, 6), (6, 8))) == 2
    assert moved_blocks(((0, 4), (4, 8)), ((0, 4), (4, 8))) == 0
