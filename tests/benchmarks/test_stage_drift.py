"""What the drift of stages' times would be worth is computed; a short run of real processes gives what it needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import stage_drift
from benchmarks.stage_drift import Plan, Timing, best_split, compare, moved_blocks, windows_of


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_stages_are_measured_by_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "drift.json"
    words = ["--seconds", "6", "--window-s", "2", "--warm-up-s", "1", "--out", str(out)]
    assert stage_drift.main(words) == 0
    results = json.loads(out.read_text())["results"]
    assert [each["stage"] for each in results["stages"]] == [0, 1]
    for each in results["stages"]:
        assert 0 < each["least_ms"] <= each["median_ms"] <= each["most_ms"]
    assert results["gain_foreseen"] >= 0 and results["block_bytes"] > 0
    assert "the slowest stage would be" in capsys.readouterr().out


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
