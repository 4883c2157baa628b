"""Nobody catches everything and goes on: a broad handler hides faults. One outer frame per process may have one."""

from __future__ import annotations

import ast

import pytest

from tests.rules.source import Module, modules, parse

pytestmark = pytest.mark.xdist_group("source rules")

BROAD = {"Exception", "BaseException"}


def faults(module: Module) -> list[str]:
    """Broad handlers that do not raise again."""
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        names = {ast.unparse(part) for part in ast.walk(node.type)} if node.type else {"a bare except"}
        broad = names & BROAD or not node.type
        # `raise` at the end of the handler's own body: it only looks, or adds to the message.
        if broad and not isinstance(node.body[-1], ast.Raise):
            found.append(f"{module.place}:{node.lineno} catches {', '.join(sorted(names & BROAD)) or 'everything'}")
    return found


@pytest.mark.slow
def test_no_handler_swallows_everything() -> None:
    found = [fault for module in modules() for fault in faults(module)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_at_most_one_outer_frame_per_file() -> None:
    crowded = []
    for module in modules():
        broad = [
            node
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ExceptHandler)
            and (node.type is None or any(ast.unparse(part) == "Exception" for part in ast.walk(node.type)))
        ]
        if len(broad) > 1:
            crowded.append(f"{module.place}: {len(broad)} handlers of Exception")
    assert not crowded, "\n".join(crowded)


@pytest.mark.parametrize(
    "handler",
    ["except:\n    pass", "except Exception:\n    pass", "except (OSError, BaseException) as e:\n    print(e)"],
)
def test_the_rule_sees_a_fault(handler: str) -> None:
    assert faults(parse(f"try:\n    x = 1\n{handler}"))


def test_looking_and_raising_again_is_fine() -> None:
    assert not faults(parse("try:\n    x = 1\nexcept Exception as e:\n    e.add_note('chunk 3')\n    raise"))
