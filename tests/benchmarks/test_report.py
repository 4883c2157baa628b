"""Results say where they come from, give no machine's paths away, and are written whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report


def test_the_header_names_what_a_reader_needs() -> None:
    head = report.header([str(report.ROOT / "training" / "judges" / "tiny_quality.py"), "--quick"], warm_up="5 s")
    assert head.command == "python -m training.judges.tiny_quality --quick"
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


def numbers(tree: Any, name: str = "") -> set[str]:
    """Names of the numbers in a result."""
    if isinstance(tree, dict):
        return set().union(*(numbers(inner, key) for key, inner in tree.items()))
    if isinstance(tree, list):
        return set().union(*(numbers(inner, name) for inner in tree))
    return {name} if isinstance(tree, int | float) and not isinstance(tree, bool) else set()


CONDITIONS = {
    "bitrate",
    "chunk_frames",
    "fps",
    "height",
    "max_ahead_s",
    "scale",
    "seconds",
    "sessions",
    "steps",
    "viewers",
}
CONDITIONS |= {"width", "load_average_before"}
SPREAD = {"count", "latencies_ms", "max_ms", "max_s", "median_ms", "median_s", "min_ms", "min_s", "p95_ms"}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("benchmarks", name) for name in ("encode_viewers", "glass_to_glass", "live_browser", "ring_schedule")),
        *(("training", name) for name in ("autoencoder_quality", "tiny_quality")),
    ],
)
def test_the_readme_defines_the_figures_of_a_stored_result(folder: str, name: str) -> None:
    """Those of speed are in `metrics.METRICS`, which has a test of its own."""
    stored = json.loads((report.ROOT / folder / "results" / f"{name}.json").read_text())
    found = numbers(stored["results"]) - CONDITIONS - SPREAD
    text = (report.ROOT / folder / "README.md").read_text(encoding="utf-8")
    assert found and not [figure for figure in found if f"`{figure}`" not in text]
