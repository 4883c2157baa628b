"""Results say where they come from and are written whole; of two: ratios in the right direction, and refusals that name
what differs, exit codes."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, report

CASE = "tiny, 4 steps, clean, 1 stage"


def result(**figures: float | None) -> dict[str, Any]:
    return {
        "header": {
            "commit": "0123456789ab",
            "date": "2026-01-01T00:00:00+00:00",
            "hardware": {"cpu": "a", "cores": 2, "load_average": 0.5},
            "software": {"torch": "2.13"},
            "threads": {"torch": 1},
        },
        "benchmark": "fps_ttff",
        "settings": {CASE: {"config": {"steps": 4, "device": "cpu"}, "amount": {"chunks": 16}}},
        "results": {CASE: {"figures": figures}},
    }


def compared(folder: Path, before: dict[str, Any], after: dict[str, Any], *words: str) -> int:
    paths = []
    for name, tree in (("before", before), ("after", after)):
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(tree))
    return compare.main([str(path) for path in paths] + list(words))


@pytest.mark.parametrize(
    ("name", "before", "after", "verdict"),
    [
        ("fps", 40.0, 44.0, "10.0% better"),
        ("fps", 40.0, 30.0, "25.0% worse"),
        ("ttff_s", 0.4, 0.5, "25.0% worse"),
        ("ttff_s", 0.4, 0.3, "25.0% better"),
        ("ttff_s", 0.4, 0.4, "same"),
        ("stalls_0", 0, 0, "same"),
        ("stalls_0", 0, 2, "worse: there were none"),
        ("text_s", None, 0.1, "-"),
    ],
)
def test_a_verdict_knows_which_direction_is_better(
    name: str, before: float | None, after: float | None, verdict: str
) -> None:
    assert compare.Row(CASE, name, before, after).verdict == verdict


def test_figures_are_compared_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    before, after = result(fps=40.0, ttff_s=0.4, text_s=None), result(fps=50.0, ttff_s=0.5, text_s=None)
    after["header"]["commit"] = "ba9876543210"
    after["header"]["software"]["torch"] = "2.14"
    after["header"]["hardware"]["load_average"] = 3.0
    assert compared(tmp_path, before, after, "--out", str(out)) == compare.SAME
    tree = json.loads(out.read_text())
    assert set(tree["header"]) == {"command", "date", "commit", "hardware", "software", "threads", "warm_up"}
    assert (tree["before"], tree["after"]) == (before["header"], after["header"])
    stored = {row["figure"]: row["ratio"] for row in tree["results"]["rows"]}
    assert stored == {"fps": pytest.approx(1.25), "ttff_s": pytest.approx(1.25)}
    printed = capsys.readouterr().out
    assert "ba9876543210" in printed and "2.14" in printed and "25.0% better" in printed and "25.0% worse" in printed


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("header", "hardware", "cpu"), "b", 'hardware: cpu is "a" before and "b" after'),
        (("header", "hardware", "gpu"), "H", 'hardware: gpu is null before and "H" after'),
        (("header", "threads", "torch"), 2, "threads: torch is 1 before and 2 after"),
        (("settings", CASE, "config", "steps"), 2, f"settings of {CASE}: config: steps is 4 before and 2 after"),
        (("settings", CASE, "amount", "chunks"), 4, "amount: chunks is 16 before and 4 after"),
        (("benchmark",), "throughput_model", 'benchmark is "fps_ttff" before and "throughput_model" after'),
        (("results",), {"else": {"figures": {}}}, "no case in common"),
    ],
)
def test_what_is_unlike_is_refused_and_named(
    tmp_path: Path, place: tuple[str, ...], value: object, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = result(fps=40.0)
    after = copy.deepcopy(before)
    inner: Any = after
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert compared(tmp_path, before, after) == compare.REFUSED
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == ""


def test_the_header_names_what_a_reader_needs() -> None:
    head = report.header([str(report.ROOT / "training" / "judges" / "tiny_quality.py"), "--quick"], warm_up="5 s")
    assert head.command == "python -m training.judges.tiny_quality --quick"
    assert head.date.endswith("+00:00")
    assert head.hardware["cpu"] and head.hardware["cores"]
    assert {"python", "torch"} <= set(head.software)
    assert head.threads["allowed_cores"]
    assert head.warm_up == "5 s"
    assert head.commit == "unknown" or len(head.commit.removesuffix("+changes")) == 12


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    head = report.header(["x"], warm_up="none")
    report.write_json(path, head, {"fps": 41.5}, seed=3)
    stored = json.loads(path.read_text())
    assert stored["results"] == {"fps": 41.5} and stored["seed"] == 3 and stored["header"]["command"] == "x"
    with pytest.raises(ValueError):
        report.write_json(path, head, {"fps": math.nan})
    assert json.loads(path.read_text()) == stored
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]
