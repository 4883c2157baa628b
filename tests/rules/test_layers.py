"""Imports go downward only, in the package and within its larger folders, and never in a circle.

The tables are those of the design; a new file or folder has to be put into them.
"""

from __future__ import annotations

import graphlib
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest

from tests.rules.source import ROOT, Module, imports, modules, parse

pytestmark = pytest.mark.xdist_group("source rules")

# From the top down. A floor may import what stands below it; what shares a floor does not import each other.
PACKAGE = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("api", "client"),
    ("server",),
    ("engine",),
    ("pipeline",),
    ("snapshot_header",),
    ("models",),
    ("config_file",),
    ("config",),
    ("core",),
    ("session_state",),
    ("video",),
    ("device", "atomic_write", "heavy_import"),
    ("errors", "clock", "version", "child_process"),
)
SERVER = (
    ("main",),
    ("app",),
    ("routes",),
    ("app_state",),
    ("jobs", "outputs"),
    ("http_server", "webrtc"),
    ("middleware", "sessions"),
    ("load", "media"),
    ("peers",),
    ("auth", "logging_setup", "metrics", "problem", "tasks"),
)
PIPELINE = (
    ("build",),
    ("profiler",),
    ("streaming_pipeline",),
    ("throughput",),
    ("worker_group",),
    ("rank_process", "snapshot", "video_input"),
    ("topology",),
    ("load_plan",),
    ("decode", "ring"),
    ("loras",),
    ("runner",),
    ("row_faults",),
    ("distributed",),
    ("kv_cache", "planner"),
    ("device_timer", "scheduler"),
)
MODELS = (
    ("loader",),
    ("download", "tiny"),
    ("model",),
    ("autoencoder",),
    ("resolve",),
    ("clip_vision", "text_encoder", "transformer"),
    ("checkpoint", "tensor_file"),
    ("hub",),
    ("catalogue",),
    ("spec",),
    ("camera", "sampling", "weight_files"),
    ("headers",),
)
FLOORS = {
    "streamdiff": PACKAGE,
    "streamdiff.server": SERVER,
    "streamdiff.pipeline": PIPELINE,
    "streamdiff.models": MODELS,
}

# The package's own __init__ hands out the Python interface, without importing it before it is used.
FREE = {
    ("streamdiff", "streamdiff.api"): "lazy: `streamdiff.stream` is `streamdiff.api.stream`",
}

# Folders that must not import a name.
FORBIDDEN = {
    "server": ("torch", "diffusers", "transformers", "streamdiff.pipeline", "streamdiff.models"),
    "models": ("asyncio", "aiortc", "av", "fastapi", "uvicorn", "zmq"),
    "pipeline": ("asyncio", "aiortc", "av", "fastapi", "uvicorn", "zmq"),
    "engine": ("aiortc", "av", "fastapi", "uvicorn"),
}
TORCH_FREE = (
    "streamdiff",
    "streamdiff.api",
    "streamdiff.cli.main",
    "streamdiff.client",
    "streamdiff.commands.models",
    "streamdiff.commands.plan",
    "streamdiff.core",
    "streamdiff.engine.messages",
    "streamdiff.engine.process.engine_process",
    "streamdiff.engine.process.fetching",
    "streamdiff.engine.process.ipc",
    "streamdiff.engine.session",
    "streamdiff.snapshot_header",
    "streamdiff.models.catalogue",
    "streamdiff.models.download",
    "streamdiff.models.headers",
    "streamdiff.models.resolve",
    "streamdiff.models.sampling",
    "streamdiff.models.transformer.tensor_names",
    "streamdiff.pipeline.planner.costs",
    "streamdiff.pipeline.planner.forecast",
    "streamdiff.pipeline.planner.memory",
    "streamdiff.pipeline.planner.model_sizes",
    "streamdiff.pipeline.planner.partition",
    "streamdiff.pipeline.planner.simulator",
    "streamdiff.pipeline.throughput",
    "streamdiff.server.app",
    "streamdiff.server.main",
    "streamdiff.server.media.playout",
    "streamdiff.video.files",
)


def part(name: str, folder: str) -> str | None:
    """`app` of `streamdiff.server.app` in `streamdiff.server`; None where `name` is not inside `folder`."""
    return name[len(folder) + 1 :].split(".")[0] if name.startswith(f"{folder}.") else None


def faults(module: Module) -> list[str]:
    """Imports of `module` that go up or aside in one of the tables, or that its folder must not have."""
    own = part(module.name, "streamdiff") or ""
    found = []
    for line, name in imports(module):
        if any(name == bad or name.startswith(f"{bad}.") for bad in FORBIDDEN.get(own, ())):
            found.append(f"{module.place}:{line} {own} must not import {name}")
        if (module.name, name) in FREE or any((module.name, name.rpartition(".")[0]) == free for free in FREE):
            continue
        for folder, floors in FLOORS.items():
            here, there = part(module.name, folder), part(name, folder)
            rank = {each: number for number, names in enumerate(floors) for each in names}
            if here is None or there is None or here == there or here not in rank or there not in rank:
                continue
            if rank[there] <= rank[here]:
                found.append(f"{module.place}:{line} {here} imports {there}, which is not below it in {folder}")
    return found


def circle(parsed: Iterable[Module]) -> list[str]:
    """Modules that import each other in a circle, at any depth of the code; none where nothing does."""
    below = {module.name: set[str]() for module in parsed}
    for module in parsed:
        # `from package import module` names both; only the module itself is meant where there is one.
        named = {name for _, name in imports(module) if name in below}
        through = {name for name in named if any(other.startswith(f"{name}.") for other in named)}
        below[module.name] = named - through - {module.name}
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        return sorted(set(error.args[1]))
    return []


@pytest.mark.parametrize("folder", FLOORS)
def test_every_part_of_a_folder_has_a_floor(folder: str) -> None:
    parts = {name for module in modules() if (name := part(module.name, folder))}
    known = {name for names in FLOORS[folder] for name in names}
    assert parts == known, f"put into the table of {folder}, or take out: {sorted(parts ^ known)}"


@pytest.mark.slow
def test_imports_go_downward() -> None:
    found = [fault for module in modules() for fault in faults(module)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_no_imports_go_in_a_circle() -> None:
    assert not circle(modules())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("streamdiff.engine.session", "from streamdiff.server import app"),
        ("streamdiff.models.tiny.model", "from ...pipeline import executor"),
        ("streamdiff.config", "import streamdiff.engine.messages"),
        ("streamdiff.server.app", "def late():\n    import torch.nn"),
        ("streamdiff.server.media.pacer", "from streamdiff.server.sessions import manager"),
        ("streamdiff.server.problem", "from streamdiff.server.metrics import Metrics"),
        ("streamdiff.pipeline.runner.model_runner", "import asyncio"),
        ("streamdiff.pipeline.kv_cache.cache", "from asyncio import Queue"),
        ("streamdiff.pipeline.kv_cache.cache", "from streamdiff.pipeline.runner.model_runner import Worker"),
        ("streamdiff.models.transformer.rope", "from streamdiff.models.autoencoder import taehv"),
    ],
)
def test_the_rule_sees_a_fault(name: str, text: str) -> None:
    assert faults(parse(text, name))


@pytest.mark.parametrize(
    "texts",
    [
        ("from streamdiff.b import x", "from streamdiff import a"),
        ("import streamdiff.b", "def late():\n    from streamdiff.a import x"),
        ("from streamdiff.b import x", "from streamdiff.c import y", "import streamdiff.a"),
    ],
)
def test_the_rule_sees_a_circle(texts: Sequence[str]) -> None:
    parsed = [parse(text, f"streamdiff.{name}") for text, name in zip(texts, "abc", strict=False)]
    assert circle(parsed) == [module.name for module in parsed]


def test_type_checking_imports_are_free() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from streamdiff import cli"
    assert not faults(parse(text, "streamdiff.server.app"))


@pytest.mark.slow
def test_importing_leaves_torch_alone() -> None:
    """In a fresh interpreter, so that whatever is imported on the way counts too."""
    heavy = "{'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    lines = ["import sys"]
    for name in TORCH_FREE:
        lines += [f"import {name}", f"print('{name}', *sorted({heavy}))"]
    process = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == list(TORCH_FREE), "names after a module were imported on its way"
