"""The benchmark of a load that doubles reads what a server tells; its twin in virtual time prints the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import simulated_load
from benchmarks.load_doubles import CHANGES, REPEATED, Watched, parser
from benchmarks.metrics import METRICS
from streamdiff.server.metrics import Metrics


def test_it_reads_a_server_s_own_figures() -> None:
    metrics = Metrics()
    metrics.repeated.labels("s-one").inc(12)
    metrics.load_changes.labels("down").inc(3)
    text = metrics.text().decode()
    assert REPEATED.findall(text) == [("s-one", "12.0")] and CHANGES.findall(text) == [("down", "3.0")]
    assert {"waited_s", "gap_worst_s", "fps"} <= set(METRICS)


def test_a_gap_belongs_to_the_time_in_which_it_ends() -> None:
    seen = Watched("s-one", [0.0, 0.1, 2.0, 2.1, 2.6])
    assert seen.longest_gap_s(1.0, 2.3) == pytest.approx(1.9)
    assert seen.longest_gap_s(2.0, 3.0) == pytest.approx(0.5)
    assert seen.longest_gap_s(5.0, 6.0) == 0.0
    assert parser().parse_args(["--", "--stages", "2"]).serve == ["--stages", "2"]


@pytest.mark.slow
def test_under_virtual_time_nobody_waits_who_can_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert simulated_load.main(["--sessions", "1", "--load", "0.7", "--out", str(out)]) == 0
    given, rigid = json.loads(out.read_text())["results"]["case"]["rows"]
    assert (given["waits"], given["waited_s"]) == (0, 0) and rigid["waited_s"] > 10
    assert "adaptive True" in capsys.readouterr().out
