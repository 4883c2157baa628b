"""The schedule benchmark runs real processes and reports what it was asked for. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ring_schedule


def test_two_stages_are_compared_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ring.json"
    words = ["--stages", "2", "--steps", "2", "--forward-s", "0.02", "--chunks", "2", "--out", str(out)]
    assert ring_schedule.main(words) == 0
    stored = json.loads(out.read_text())
    assert stored["plan"]["stages"] == 2 and "sleep" in stored["claim"]
    for context, sessions in (("clean", 2), ("staircase", 1), ("matched", 1)):
        found = stored["results"][context]
        assert found["sessions"] == sessions
        for name in ("one_stage", "stages"):
            assert found[name]["chunks_per_s"] > 0
            # Two steps of 0.02 s each at least: what sleeps cannot be quicker.
            assert found[name]["first_chunk_s"] >= 0.04
    assert "| matched" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--stages", "1"], ["--forward-s", "0"], ["--chunks", "1"]])
def test_plans_that_measure_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ring_schedule.main(words)
    assert ended.value.code == 2 and "at least 2" in capsys.readouterr().err
