"""Every benchmark that writes a result says in its header what went before as warm-up."""

from __future__ import annotations

import ast

import pytest

from tests.rules.source import ROOT

PROGRAMS = sorted(
    path
    for path in (*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "training" / "judges").glob("*.py"))
    if "__main__" in (text := path.read_text(encoding="utf-8")) and ('"--out"' in text or "write_json(" in text)
)


def faults(text: str) -> list[str]:
    """What is wrong with the headers that a benchmark makes."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    heads = [call for call in calls if ast.unparse(call.func) == "report.header"]
    found = [] if heads else ["takes no report.header()"]
    for call in heads:
        told = next((word.value for word in call.keywords if word.arg == "warm_up"), None)
        if told is None or (isinstance(told, ast.Constant) and not str(told.value or "").strip()):
            found.append(f"line {call.lineno}: says nothing about warm-up")
    if any(ast.unparse(call.func).split(".")[-1] == "Header" for call in calls):
        found.append("makes a Header of its own")
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_result_says_what_went_before_as_warm_up(path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


def test_those_that_write_results_are_found() -> None:
    names = {path.stem for path in PROGRAMS}
    assert names >= {"fps_ttff", "ring_schedule", "throughput_model", "restart"}
    assert names >= {"autoencoder_quality", "tiny_quality", "restyle_quality"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("print(1)", "takes no report.header()"),
        ("head = report.header()", "line 1: says nothing about warm-up"),
        ('head = report.header(warm_up=" ")', "line 1: says nothing about warm-up"),
        ('report.header(warm_up="a chunk"); report.Header("x")', "makes a Header of its own"),
    ],
)
def test_the_rule_sees_what_it_forbids(text: str, fault: str) -> None:
    assert faults(text) == [fault]
