"""The package's sources as syntax trees, for the tests of the house rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "streamdiff"


@dataclass(frozen=True)
class Module:
    """`name` is dotted (`streamdiff.server.app`); `place` is the path from the repository's root, for messages."""

    name: str
    place: str
    text: str
    tree: ast.Module
    is_package: bool


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    return tuple(_read(path) for path in sorted(PACKAGE.rglob("*.py")))


def _read(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    text = path.read_text(encoding="utf-8")
    return Module(name, str(path.relative_to(ROOT)), text, ast.parse(text), is_package)


def parse(text: str, name: str = "streamdiff.example") -> Module:
    """A module from text, to try a rule on."""
    return Module(name, f"{name}.py", text, ast.parse(text), False)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported at any depth, but for blocks that only a type checker reads."""
    for node in _running(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for branch in child.orelse:
                yield branch
                yield from _running(branch)
            continue
        yield child
        yield from _running(child)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])
