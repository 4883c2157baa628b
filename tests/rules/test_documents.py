"""What the documents point at exists, and README's Python example is the one that is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rules.source import ROOT

FOLDERS = ("docs", "benchmarks", "training")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
DECISIONS = {path.name[:4]: path for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))}


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


def test_the_tour_names_files_that_exist() -> None:
    """Also without `.py`, and then with a folder before them."""
    text = (ROOT / "docs" / "tour.md").read_text("utf-8")
    names = set(re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`", text))
    paths = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+)`", text)
    names |= {f"{path}.py" for path in paths if not (ROOT / "streamdiff" / path).is_dir()}
    assert 15 < len(names) <= 25, "few enough to read them all"
    missing = [name for name in names if not (ROOT / "streamdiff" / name).exists()]
    assert not missing


def test_readmes_python_example_is_the_tested_one() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert match is not None
    example = (ROOT / "examples" / "hello.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert match[1].strip() == example.replace(", strict=False", "").strip()


def test_readmes_commands_are_makes_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        word
        for document in DOCUMENTS
        for word in re.findall(r"(?:`|^)make ([a-z]+)", document.read_text("utf-8"), re.M)
    }
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert {"serve", "test", "check", "bench"} <= named
    assert named <= targets


def test_every_fault_that_is_told_of_is_played_by_a_test() -> None:
    """The table of what is lost, line by line."""
    text = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    table = text.partition("## What is lost")[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 8
    for line in lines:
        [(place, name)] = re.findall(r"`([\w/]+\.py)::(test_\w+)`", line)
        assert f"def {name}(" in (ROOT / "tests" / place).read_text("utf-8"), line


@pytest.mark.parametrize("number", DECISIONS)
def test_a_decision_fits_on_a_page(number: str) -> None:
    text = DECISIONS[number].read_text("utf-8")
    assert text.startswith(f"# {number}: ") and "**Question.**" in text and "**Price.**" in text
    assert len(text.split()) <= 400


def test_the_decisions_that_code_and_documents_name_exist() -> None:
    sources = [path for folder in ("streamdiff", "tests", *FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    named = {
        (path.relative_to(ROOT), number)
        for path in [*sources, *DOCUMENTS]
        for number in re.findall(r"(?:decisions/|[Dd]ecisions? )(\d{4})", path.read_text("utf-8"))
    }
    assert len(named) > 20
    assert {(path, number) for path, number in named if number not in DECISIONS} == set()
