"""Only `streamdiff.clock` reads the clock; everybody else is given the time."""

from __future__ import annotations

import ast

import pytest

from tests.rules.source import Module, imports, modules, parse

pytestmark = pytest.mark.xdist_group("source rules")

CLOCKS = {"streamdiff.clock"}
READING = {"now", "utcnow", "today", "fromtimestamp"}


def faults(module: Module) -> list[str]:
    """Places where the module gets the time by itself: `time`, `datetime.now()`, an event loop's `time()`."""
    found = [
        f"{module.place}:{line} imports {name}"
        for line, name in imports(module)
        if name == "time" or name.startswith("time.")
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {*READING, "time"}:
            owner = ast.unparse(node.func.value)
            if (node.func.attr in READING and owner.split(".")[-1] in ("datetime", "date")) or (
                node.func.attr == "time" and owner.endswith(("loop", "loop()"))
            ):
                found.append(f"{module.place}:{node.lineno} calls {owner}.{node.func.attr}()")
    return found


@pytest.mark.slow
def test_only_the_clock_module_reads_the_clock() -> None:
    found = [fault for module in modules() if module.name not in CLOCKS for fault in faults(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from time import monotonic",
        "import datetime\nx = datetime.datetime.now()",
        "import asyncio\nx = asyncio.get_running_loop().time()",
    ],
)
def test_the_rule_sees_a_fault(text: str) -> None:
    assert faults(parse(text))
