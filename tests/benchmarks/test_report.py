"""Results say where they come from, give no machine's paths away, and are written whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import report


def test_the_header_names_what_a_reader_needs() -> None:
    head = report.header([str(report.ROOT / "benchmarks" / "tiny_quality.py"), "--quick"], warm_up="5 s")
    assert head.command == "python -m benchmarks.tiny_quality --quick"
    assert head.date.endswith("+00:00")
    assert head.hardware["cpu"] and head.hardware["cores"]
    assert {"python", "torch"} <= set(head.software)
    assert head.threads["allowed_cores"]
    assert head.warm_up == "5 s"
    assert head.commit == "unknown" or len(head.commit.removesuffix("+changes")) == 12


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/someone/runs/model.pt", ".../model.pt"),
        ("--out=/home/someone/x.json", "--out=.../x.json"),
        (str(report.ROOT / "configs" / "a.yaml"), "configs/a.yaml"),
        ("--steps=4", "--steps=4"),
        ("runs/x", "runs/x"),
    ],
)
def test_paths_are_shown_without_the_machine(given: str, shown: str) -> None:
    assert report.public_path(given) == shown


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    head = report.header(["x"], warm_up="none")
    report.write_json(path, head, {"fps": 41.5}, seed=3)
    stored = json.loads(path.read_text())
    assert stored["results"] == {"fps": 41.5} and stored["seed"] == 3 and stored["header"]["command"] == "x"
    with pytest.raises(ValueError, match="JSON"):
        report.write_json(path, head, {"fps": math.nan})
    assert json.loads(path.read_text()) == stored
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_table_is_markdown() -> None:
    assert report.table([{"what": "fps", "value": 41.5}, {"what": "n", "value": None}]).splitlines() == [
        "| what | value  |",
        "|------|--------|",
        "| fps  | 41.500 |",
        "| n    | -      |",
    ]


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (95, 3.85), (100, 4.0)])
def test_percentiles_lie_between_neighbours(percent: float, value: float) -> None:
    assert report.percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)
    assert report.percentile([7.0], percent) == 7.0


@pytest.mark.parametrize(("seconds", "text"), [(48.0, "48 s"), (720.0, "12 min"), (12240.0, "3.4 h")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text
