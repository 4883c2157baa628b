"""The schedule benchmark runs real processes and reports what it was asked for. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ring_schedule
from benchmarks.sleeping_ring import Done, figures_of


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_stages_are_compared_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ring.json"
    words = ["--stages", "2", "--steps", "2", "--forward-s", "0.02", "--rounds", "1", "--out", str(out)]
    assert ring_schedule.main(words) == 0
    stored = json.loads(out.read_text())
    assert stored["plan"]["stages"] == 2 and "sleep" in stored["claim"]
    results = stored["results"]["20 ms"]
    for context, sessions in (("clean", 2), ("staircase", 1), ("same_step", 1)):
        found = results[context]
        assert found["sessions"] == sessions
        for name in ("one_stage", "stages"):
            assert found[name]["chunks_per_s"] > 0
            # Two steps of 0.02 s each at least: what sleeps cannot be quicker.
            assert found[name]["first_chunk_s"] >= 0.04
        assert found["ideal_rate_ratio"] == pytest.approx(2, rel=0.34), "of two stages twice the rate is the best"
        # A rank's round is its sleep, its own work and its waiting.
        hop = found["hop"]
        assert all(hop[name] > 0 for name in ("head_own_us", "others_own_us", "cpu_us"))
        assert min(hop["head_waits_us"], hop["others_wait_us"], hop["overslept_us"]) >= 0
    printed = capsys.readouterr().out
    assert "| same_step" in printed and len([line for line in printed.splitlines() if "times" in line]) == 6


def test_figures_are_those_of_what_was_finished_after_the_warm_up() -> None:
    """Two sessions in turn, a chunk a second; one of the second session's comes late."""
    done = [Done(float(at), 2.0 if at < 4 else 3.0, at % 2) for at in range(9)]
    done[7] = done[7]._replace(at_s=7.5)
    found = figures_of(done, 3)
    assert found["chunks_per_s"] == pytest.approx(6 / (8 - 2))
    assert found["latency_s"] == pytest.approx((2 + 5 * 3) / 6)
    assert (found["mean_gap_s"], found["longest_gap_s"]) == pytest.approx(((3 * 2 + 2 + 2 + 2.5) / 6, 2.5))
