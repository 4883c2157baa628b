"""The pages of docs/models: every model in one of them, files and figures of the catalogue, commands that parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from streamdiff.cli import main, parser
from streamdiff.models import catalogue, hub, resolve
from streamdiff.pipeline.planner.memory import stage_memory
from tests.rules.source import ROOT

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "models").glob("*.md"))}
INDEX = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
GUIDES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("start", "checkpoint")}
COMMANDS = [
    (name, line.removeprefix(".venv/bin/"))
    for name, text in {**PAGES, **GUIDES, "index": INDEX}.items()
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.removeprefix(".venv/bin/").startswith("streamdiff ")
]


def named(text: str) -> set[str]:
    """Models of the catalogue that a text names."""
    return {name for name in catalogue.entries() if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", text)}


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"


def test_every_model_has_its_page() -> None:
    pages = {name: [page for page, text in PAGES.items() if name in named(text)] for name in catalogue.entries()}
    assert {name: found for name, found in pages.items() if len(found) != 1} == {}
    families = [{catalogue.find(name).family for name in named(text)} for text in PAGES.values()]
    assert all(len(family) == 1 for family in families), "a page is about one family"


def test_the_index_leads_to_every_page() -> None:
    assert set(re.findall(r"\(models/([\w.-]+)\.md\)", INDEX)) == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_that_are_computed(page: str) -> None:
    """Memory of every model of the page, as `streamdiff models` has it."""
    rows = re.findall(r"^\| `([\w.-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGES[page], re.MULTILINE)
    assert {row[0] for row in rows} == named(PAGES[page])
    for name, *figures in rows:
        entry = catalogue.find(name)
        cases = [(1, "none"), (2, "none"), (4, "none"), (1, "int8")]
        assert figures == [gigabytes(max(each.total for each in stage_memory(entry, *case))) for case in cases], name


@pytest.mark.parametrize("page", PAGES)
def test_how_it_runs_is_what_the_catalogue_says(page: str) -> None:
    for name in named(PAGES[page]):
        entry = catalogue.find(name)
        for files in filter(None, (entry.weights, entry.lora)):
            assert hub.download_command(files.repo, files.files) in PAGES[page].splitlines()
        if entry.weights is None or entry.stream is None or entry.context is None or entry.sampling is None:
            continue
        kv_context = entry.context.default
        sizes = entry.stream.chunk_latents, entry.stream.window(kv_context), entry.stream.sink_latents
        steps, licence = entry.sampling.schedule().steps, entry.weights.licence or "not said"
        start = " | ".join(map(str, (f"| `{name}`", steps, *sizes, f"`{kv_context}` |")))
        (row,) = [line for line in PAGES[page].splitlines() if line.startswith(start)]
        assert row.endswith(f"| {licence} |")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_can_be_typed(page: str, line: str) -> None:
    """They parse, their values are allowed, and the model they name is known. Nothing is loaded."""
    arguments = parser.parse(shlex.split(line, comments=True)[1:])
    name = getattr(arguments, "model.name", None) or getattr(arguments, "name", None)
    if name is not None and Path(name).suffix != ".safetensors" and not resolve.is_repository(name):
        assert catalogue.find(name).name in (named(PAGES[page]) if page in PAGES else catalogue.entries())
    if hasattr(arguments, "config"):
        main._config(arguments)


def test_there_are_commands_in_every_page() -> None:
    assert {page for page, _ in COMMANDS} == {*PAGES, *GUIDES, "index"}
