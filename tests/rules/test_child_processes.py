"""Every process is started with `child_process.environment`, or it would import modules of the current folder."""

from __future__ import annotations

import ast

import pytest

from tests.rules.source import Module, modules, parse

pytestmark = pytest.mark.xdist_group("source rules")

STARTS = {
    "Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput",
    "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell", "start_processes",
    "system", "popen", "posix_spawn", "posix_spawnp",
}  # fmt: skip
"""Last names of what starts a process; `run` and `call` only as those of `subprocess`."""
FAMILIES = ("spawn", "exec")
"""Beginnings of more of them, of `os`."""
FORBIDDEN = {"elastic_launch"}
"""A launcher that listens to strangers."""


def starts(call: ast.Call) -> bool:
    """Whether the call starts a process."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in STARTS and not name.startswith(FAMILIES):
        return False
    of = ast.unparse(call.func).split(".")[:-1]
    if name in ("run", "call"):
        return of == ["subprocess"]
    return name in STARTS or (of == ["os"] and name.startswith(FAMILIES))


def faults(module: Module) -> list[str]:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and starts(node):
            given = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in ("env", "envs")]
            if not any("environment()" in value for value in given):
                found.append(f"{module.place}:{node.lineno} starts a process without child_process.environment()")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {part for alias in node.names for part in alias.name.split(".")}
            for name in sorted(names & FORBIDDEN):
                found.append(f"{module.place}:{node.lineno} imports {name}")
    return found


@pytest.mark.slow
def test_every_child_has_the_safe_environment() -> None:
    found = [fault for module in modules() for fault in faults(module)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_the_rule_sees_the_children_there_are() -> None:
    seen = {
        module.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and starts(node)
    }
    assert seen >= {
        "streamdiff.child_process",
        "streamdiff.engine.process.launcher",
    }


@pytest.mark.parametrize(
    "text",
    [
        "subprocess.Popen([sys.executable, '-m', 'x'])",
        "subprocess.run(['x'], env=os.environ)",
        "await asyncio.create_subprocess_exec('x')",
        "start_processes('x', 'y', {}, {}, logs)",
        "os.execv('x', [])",
    ],
)
def test_the_rule_sees_a_fault(text: str) -> None:
    assert faults(parse(text))


def test_a_child_with_the_environment_is_fine() -> None:
    assert not faults(parse("subprocess.Popen(['x'], env={**child_process.environment(), 'RANK': '0'})"))
