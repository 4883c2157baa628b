"""The swap benchmark's figures, and a real server with more sessions than memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import swap
from benchmarks.metrics import METRICS
from benchmarks.swap import Switch


def test_figures_are_of_all_turns() -> None:
    found = swap.figures([Switch("host", 0.1 * turn, 0.2 * turn, True) for turn in range(1, 21)])
    assert found["switch_picture_s"] == pytest.approx(1.05) and found["switch_made_s"] == pytest.approx(2.1)
    assert found["switch_picture_s"] < found["switch_picture_p95_s"] <= 2.0 * 1.05
    assert set(found) <= set(METRICS)


@pytest.mark.soak
def test_nobody_is_refused_and_nothing_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "swap.json"
    words = ["--sessions", "5", "--play", "2", "--host", "1", "--fps", "5", "--out", str(out)]
    assert swap.main(words) == swap.OK
    [(label, result)] = json.loads(out.read_text())["results"].items()
    assert result["kept"] == 5 and sum(result["from"].values()) == 5 and result["from"]["device"] < 5
    assert f"| {label} " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--sessions", "1"], ["--play", "0"], ["--host", "-1"]])
def test_wrong_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        swap.main(words)
    assert words[0] in capsys.readouterr().err
