"""The rush benchmark tells right answers from wrong ones, and knocks at a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rush
from benchmarks.metrics import METRICS
from benchmarks.rush import Rush, Watching


def test_figures_are_of_the_last_answer_and_the_worst_round() -> None:
    rounds = [
        Rush([201, 503, 503], [0.3, 0.1, 0.2], 0.05),
        Rush([503, 201, 503], [0.4, 0.5, 0.1], 0.03),
        Rush([503, 503, 201], [0.6, 0.7, 0.2], 0.04),
    ]
    found = rush.figures(rounds)
    assert found == pytest.approx({"refused_s": 0.4, "refused_worst_s": 0.7, "placed_s": 0.3, "gap_worst_s": 0.05})
    assert set(found) <= set(METRICS)


@pytest.mark.parametrize(
    ("statuses", "right"), [([201, 503, 201], True), ([201, 503, 503], False), ([201, 201, 429], False)]
)
def test_a_round_is_right_when_the_free_places_were_given_and_no_more(statuses: list[int], right: bool) -> None:
    assert rush.is_right(Rush(statuses, [0.0] * 3, 0.0), free=2) == right


def test_a_gap_that_touches_the_rush_counts() -> None:
    watching = Watching([1.0, 1.5, 1.6, 2.2, 5.0])
    assert watching.longest_gap_s(1.4, 1.9) == pytest.approx(0.6)
    assert watching.longest_gap_s(1.2, 1.3) == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.soak
def test_a_real_server_gives_the_places_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, alone = tmp_path / "rush.json", tmp_path / "alone.yaml"
    alone.write_text("serve: {spare: false}")  # a spare engine, which nobody needs here, takes seconds to import torch
    words = ["--count", "12", "--places", "3", "--repeats", "2", "--out", str(out), "--", "--config", str(alone)]
    assert rush.main(words) == rush.OK
    stored = json.loads(out.read_text())
    [(label, result)] = stored["results"].items()
    assert list(stored["settings"]) == [label] and result["right"] == 2
    for each in result["rounds"]:
        assert sorted(each["statuses"]) == [201, 201] + [503] * 10
        assert min(each["answered_s"]) > 0 and each["gap_s"] > 0
    assert f"| {label} " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--count", "0"], ["--places", "1"], ["--repeats", "0"]])
def test_wrong_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rush.main(words)
    assert words[0] in capsys.readouterr().err
