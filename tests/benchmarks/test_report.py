"""Results say where they come from, give no machine's paths away, and are written whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
