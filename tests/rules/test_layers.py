"""Imports go downward only. The table is the one of the design; a new folder has to be put into it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.rules.source import ROOT, Module, imports, modules, parse

# From the top down. A layer may import what stands below it, and itself.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("cli_parsers",),
    ("cli_convert", "cli_exact", "cli_options", "convert", "doctor", "exact", "generate"),
    ("models_report",),
    ("exact_model",),
    ("api",),
    ("serve",),
    ("engine",),
    ("pipeline",),
    ("state",),
    ("models",),
    ("child_process", "config", "device", "whole"),
    ("errors", "clock", "pictures", "version"),
)
RANK = {name: rank for rank, names in enumerate(reversed(LAYERS)) for name in names}

# The package's own __init__ hands out the Python interface, without importing it before it is used.
FREE = {("streamdiff", "api"): "lazy: `streamdiff.stream` is `streamdiff.api.stream`"}

# Folders (or modules) that must not import a name, and what stays allowed.
FORBIDDEN = {
    "serve": (
        "torch",
        "diffusers",
        "transformers",
        "streamdiff.pipeline",
        "streamdiff.pipeline.kv_cache",
        "streamdiff.models",
    ),
    "models": ("asyncio", "aiortc", "av", "fastapi", "uvicorn", "zmq"),
    "state": ("asyncio", "aiortc", "av", "fastapi", "uvicorn", "zmq"),
    "pipeline": ("asyncio", "aiortc", "av", "fastapi", "uvicorn", "zmq"),
    "engine": ("aiortc", "av", "fastapi", "uvicorn"),
}
TORCH_FREE = (
    "streamdiff",
    "streamdiff.api",
    "streamdiff.cli.main",
    "streamdiff.engine.process.ipc",
    "streamdiff.engine.messages",
    "streamdiff.server.media.playout",
    "streamdiff.engine.session",
    "streamdiff.engine.process.engine_process",
    "streamdiff.engine.process.fetching",
    "streamdiff.models.catalogue.entries",
    "streamdiff.models.checkpoint.download",
    "streamdiff.models.catalogue.recognition",
    "streamdiff.models.resolve",
    "streamdiff.models.checkpoint.safetensors_header",
    "streamdiff.models.sampling",
    "streamdiff.models.catalogue.specs",
    "streamdiff.models.transformer.tensor_names",
    "streamdiff.commands.models",
    "streamdiff.pipeline.planner.costs",
    "streamdiff.pipeline.planner.model_sizes",
    "streamdiff.pipeline.planner.memory",
    "streamdiff.pipeline.throughput",
    "streamdiff.pipeline.planner.stage_layout",
    "streamdiff.commands.plan",
    "streamdiff.pipeline.planner.simulator",
    "streamdiff.pipeline.planner.trace",
    "streamdiff.server.app",
    "streamdiff.video.writer",
    "streamdiff.video.reader",
    "streamdiff.server.main",
)


def layer(name: str) -> str:
    """`serve` of `streamdiff.server.app`; `streamdiff` itself is a layer of its own, below all."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def faults(module: Module) -> list[str]:
    """Imports of `module` that go up or aside, or that its folder must not have."""
    own = layer(module.name)
    found = []
    for line, name in imports(module):
        if any(name == bad or name.startswith(f"{bad}.") for bad in FORBIDDEN.get(own, ())):
            found.append(f"{module.place}:{line} {own} must not import {name}")
        target = layer(name)
        if name.split(".")[0] != "streamdiff" or target == own or target not in RANK or (own, target) in FREE:
            continue
        if RANK[target] >= RANK.get(own, 0) and (own, target) != ("streamdiff", "version"):
            found.append(f"{module.place}:{line} {own} imports {target}, which is not below it")
    return found


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {layer(module.name) for module in modules()} - {"streamdiff"}
    assert parts <= set(RANK), f"put into LAYERS: {sorted(parts - set(RANK))}"


def test_imports_go_downward() -> None:
    found = [fault for module in modules() for fault in faults(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("streamdiff.engine.session", "from streamdiff.server import app"),
        ("streamdiff.models.tiny.model", "from ...pipeline import runtime"),
        ("streamdiff.config", "import streamdiff.engine.messages"),
        ("streamdiff.server.app", "def late():\n    import torch.nn"),
        ("streamdiff.pipeline.runner.worker", "import asyncio"),
        ("streamdiff.pipeline.kv_cache.attention", "from asyncio import Queue"),
    ],
)
def test_the_rule_sees_a_fault(name: str, text: str) -> None:
    assert faults(parse(text, name))


def test_type_checking_imports_are_free() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from streamdiff import cli"
    assert not faults(parse(text, "streamdiff.server.app"))


def test_importing_leaves_torch_alone() -> None:
    """In a fresh interpreter, so that whatever is imported on the way counts too."""
    heavy = "{'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    lines = ["import sys"]
    for name in TORCH_FREE:
        lines += [f"import {name}", f"print('{name}', *sorted({heavy}))"]
    process = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == list(TORCH_FREE), "names after a module were imported on its way"
