"""The benchmark of scheduling cost measures decisions of a full ring and writes down what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scheduler_cost
from benchmarks.scheduler_cost import CONTEXTS, Plan, figures, main, measure
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler
from streamdiff.pipeline.scheduler.step import MicroStep


def test_percentiles_are_those_of_the_samples() -> None:
    assert figures([float(n) for n in range(101)]) == {"median_us": 50.0, "p99_us": 99.0}


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_measured_decision_hands_out_a_row(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []
    served: set[int] = set()

    class Counting(StreamBatchScheduler):
        def next(self) -> list[MicroStep]:
            rows = super().next()
            handed.append(len(rows))
            served.update(row.session for row in rows)
            assert self.in_flight <= 4 * self.max_rows
            return rows

    monkeypatch.setattr(scheduler_cost, "StreamBatchScheduler", Counting)
    plan = Plan(max_rows=2, decisions=200)
    assert len(measure(plan, context)) == 200
    assert set(handed) == {2} and len(handed) == 220, "the ring is full all the time"
    assert served == set(range(8))


def test_the_table_is_printed_and_the_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost.json"
    assert main(["--decisions", "50", "--sessions", "3", "--out", str(out)]) == 0
    stored = json.loads(out.read_text())
    assert set(stored["results"]) == set(CONTEXTS)
    assert all(0 < found["median_us"] <= found["p99_us"] for found in stored["results"].values())
    assert stored["plan"]["sessions"] == 3 and stored["header"]["commit"]
    printed = capsys.readouterr().out
    assert "| kv_context" in printed and "under 100 microseconds" in printed


@pytest.mark.parametrize("words", [["--sessions", "0"], ["--decisions", "9"], ["--max-rows", "-1"]])
def test_numbers_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert f"{words[0]} is {words[1]}; at least" in capsys.readouterr().err
