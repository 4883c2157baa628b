"""What README and docs show is run as it stands there: Python code beside a clone, commands, and the rest is parsed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamdiff.cli.parser import parse
from tests.rules.source import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN = {"README.md", "tiny.md", "plan.md"}
"""Their commands need nothing but what is in the package, or say which file they read."""
FOREIGN = ("--profile",)
"""Options that name a file which a reader makes first."""


def fenced(document: Path, language: str = r"\w*") -> Iterator[str]:
    """The code blocks of a document."""
    for block in re.findall(rf"^```{language}\n(.*?)^```", document.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        yield block.replace("\\\n", " ")


def commands(document: Path) -> list[list[str]]:
    """The `streamdiff` commands in a document's code blocks, as words."""
    lines = [line for block in fenced(document) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("streamdiff ")]


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if commands(each)], ids=lambda path: path.name)
def test_commands_in_documents_can_be_typed(document: Path) -> None:
    for words in commands(document):
        assert parse(words[1:]).command == words[1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_commands_that_need_nothing_more_run_as_they_stand(tmp_path: Path) -> None:
    shown = {tuple(words) for each in DOCUMENTS if each.name in RUN for words in commands(each)}
    runnable = {words for words in shown if words[1] != "serve" and not set(FOREIGN) & set(words)}
    assert {words[1] for words in runnable} >= {"generate", "plan"}
    for words in sorted(runnable):
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, env=environment(), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "star.mp4").stat().st_size > 0


@pytest.mark.slow
def test_readmes_python_runs_from_a_script_beside_the_clone(tmp_path: Path) -> None:
    """A folder named `streamdiff` beside a script must not be taken for the package (installed in editable mode)."""
    (tmp_path / "streamdiff").symlink_to(ROOT, target_is_directory=True)
    (code,) = fenced(ROOT / "README.md", "python")
    (tmp_path / "hello.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "hello.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("frame 120: (")


def environment() -> dict[str, str]:
    """The user's, who has installed the package and nothing else."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
