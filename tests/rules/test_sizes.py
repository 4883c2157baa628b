"""Bad code lives in the tail: the longest files and functions are bounded. An exception is listed with its reason."""

from __future__ import annotations

import ast

import pytest

from tests.rules.source import Module, modules, parse

pytestmark = pytest.mark.xdist_group("source rules")

FILE_LINES = 700
FUNCTION_LINES = 60

# "path" or "path:function" -> (lines allowed, reason)
EXCEPTIONS: dict[str, tuple[int, str]] = {}


def sizes(module: Module) -> dict[str, tuple[int, int]]:
    """(lines, limit) of the file and of each function in it."""
    found = {module.place: (len(module.text.splitlines()), FILE_LINES)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            found[f"{module.place}:{node.name}"] = (node.end_lineno - node.lineno + 1, FUNCTION_LINES)
    return found


def too_long(module: Module) -> list[str]:
    return [
        f"{place} has {lines} lines, at most {EXCEPTIONS.get(place, (limit, ''))[0]} are allowed"
        for place, (lines, limit) in sizes(module).items()
        if lines > EXCEPTIONS.get(place, (limit, ""))[0]
    ]


@pytest.mark.slow
def test_files_and_functions_are_short() -> None:
    found = [fault for module in modules() for fault in too_long(module)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_every_exception_is_still_needed() -> None:
    now = {place: size for module in modules() for place, size in sizes(module).items()}
    stale = [place for place in EXCEPTIONS if place not in now or now[place][0] <= now[place][1]]
    assert not stale, f"remove from EXCEPTIONS: {stale}"


def test_the_rule_sees_a_fault() -> None:
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    assert too_long(parse(f"def long():\n{body}"))
    assert too_long(parse("x = 1\n" * (FILE_LINES + 1)))
