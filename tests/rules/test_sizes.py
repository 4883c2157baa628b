"""How large the project is: the longest files and functions and the package as a whole (decision 0062).

A cap is moved by a decision. It is lowered when the package has become smaller.
"""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from io import StringIO

import pytest

from tests.rules.source import ROOT, Module, modules, parse

pytestmark = pytest.mark.xdist_group("source rules")

FILE_LINES = 700
FUNCTION_LINES = 60
CAPS = {
    "code lines": 29_250,
    "files": 195,
    "classes with Session in their name": 12,
    "class names with two meanings": 0,
    "raw lines of tests": 46_500,
    "raw lines of benchmarks": 5_800,
}
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


def sizes(module: Module) -> dict[str, tuple[int, int]]:
    """(lines, limit) of the file and of each function in it."""
    found = {module.place: (len(module.text.splitlines()), FILE_LINES)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            found[f"{module.place}:{node.name}"] = (node.end_lineno - node.lineno + 1, FUNCTION_LINES)
    return found


def too_long(module: Module) -> list[str]:
    return [f"{place} has {lines} lines, at most {limit} are allowed"
            for place, (lines, limit) in sizes(module).items() if lines > limit]  # fmt: skip


def code_lines(module: Module) -> int:
    """Lines without blanks, comments and docstrings, those below a field included."""
    docs: set[int] = set()
    for node in ast.walk(module.tree):
        for each in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                docs |= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(StringIO(module.text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def classes(of: Iterable[Module]) -> dict[str, set[str]]:
    """The modules of each class name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module in of:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(module.name)
    return found


def raw_lines(folder: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.slow
def test_files_and_functions_are_short() -> None:
    found = [fault for module in modules() for fault in too_long(module)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_the_project_stays_within_its_caps() -> None:
    names = classes(modules())
    found = {
        "code lines": sum(map(code_lines, modules())),
        "files": len(modules()),
        "classes with Session in their name": sum("Session" in name for name in names),
        "class names with two meanings": sum(len(places) > 1 for places in names.values()),
        "raw lines of tests": raw_lines("tests"),
        "raw lines of benchmarks": raw_lines("benchmarks"),
    }
    over = [f"{found[name]:,} {name}; the cap is {cap:,}" for name, cap in CAPS.items() if found[name] > cap]
    assert not over, "\n".join(over)


def test_the_rules_see_a_fault() -> None:
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    assert too_long(parse(f"def long():\n{body}"))
    assert too_long(parse("x = 1\n" * (FILE_LINES + 1)))
    assert code_lines(parse('"""Doc."""\n\n# why\nclass A:\n    """Doc."""\n    x: int = 1\n    """Doc."""\n')) == 2
    assert classes([parse("class A: ...", "a"), parse("class A: ...", "b")]) == {"A": {"a", "b"}}
