"""What README and docs show is run as it stands there: README's Python code beside a clone, and commands. Other Python
code is parsed and its calls compared with the package's signatures; YAML is read as a configuration."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import streamdiff
from streamdiff.cli.parser import parse
from streamdiff.config import ModelConfig
from streamdiff.config_file import load
from streamdiff.errors import ConfigError
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


@pytest.mark.slow
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if commands(each)], ids=lambda path: path.name)
def test_commands_in_documents_can_be_typed(document: Path) -> None:
    for words in commands(document):
        assert parse(words[1:]).command == words[1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_commands_that_need_nothing_more_run_as_they_stand(tmp_path: Path, every: bool) -> None:
    """Of those with the same options, which differ in a value such as the prompt, the first, or `every` one. Videos
    are shorter: one of a second takes the same way."""
    shown = {tuple(words) for each in DOCUMENTS if each.name in RUN for words in commands(each)}
    runnable = {words for words in shown if words[1] != "serve" and not set(FOREIGN) & set(words)}
    assert {words[1] for words in runnable} >= {"generate", "plan"}
    first = {tuple(word for word in words if word.startswith("--")): words for words in sorted(runnable, reverse=True)}
    for words in sorted(runnable if every else first.values()):
        shorter = ["1" if option == "--seconds" else word for option, word in zip(("", *words), words, strict=False)]
        done = subprocess.run([sys.executable, "-m", *shorter], cwd=tmp_path, env=environment(), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "star.mp4").stat().st_size > 0


def run_script(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python code as a script of that folder."""
    (folder / "hello.py").write_text(code, encoding="utf-8")
    words = [sys.executable, "hello.py"]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_script_beside_the_clone_imports_the_package(tmp_path: Path) -> None:
    """A folder named `streamdiff` beside it must not be taken for the package (installed in editable mode)."""
    (tmp_path / "streamdiff").symlink_to(ROOT, target_is_directory=True)
    run_script(tmp_path, "import streamdiff; print(streamdiff.open)")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_readmes_python_runs_as_it_stands(tmp_path: Path) -> None:
    (code,) = fenced(ROOT / "README.md", "python")
    done = run_script(tmp_path, code)
    assert done.stdout.splitlines()[-1].startswith("frame 120: (")


def wrong_calls(code: str) -> list[str]:
    """Calls of the package, and uses of a session that `with streamdiff.open(...) as` names, that do not exist or do
    not take these arguments."""
    tree, found = ast.parse(code), []
    sessions = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and ast.unparse(item.context_expr).startswith("streamdiff.")
    }
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if (owner := node.value.id) == "streamdiff":
            used = getattr(streamdiff, node.attr) if node.attr in streamdiff.__all__ else None
        elif owner in sessions:
            used = getattr(streamdiff.StreamSession, node.attr, None)
        else:
            continue
        call = calls.get(node)
        if used is None or (call is not None and not takes(used, call, bound=owner in sessions)):
            found.append(ast.unparse(node if call is None else call))
    return found


def takes(called: Callable[..., object], call: ast.Call, bound: bool) -> bool:
    """Whether a function has the arguments of a call; what it does not name itself is a setting of the model."""
    signature, named = inspect.signature(called), {str(each.arg) for each in call.keywords}
    try:
        signature.bind(*[None] * (len(call.args) + bound), **dict.fromkeys(named))
    except TypeError:
        return False
    return named <= {*signature.parameters, "model", *ModelConfig.model_fields}


@pytest.mark.parametrize(
    "document", [each for each in DOCUMENTS if any(fenced(each, "python"))], ids=lambda path: path.name
)
def test_python_in_documents_calls_what_there_is(document: Path) -> None:
    for code in fenced(document, "python"):
        assert not wrong_calls(code), code


@pytest.mark.parametrize(
    "document", [each for each in DOCUMENTS if any(fenced(each, "yaml"))], ids=lambda path: path.name
)
def test_yaml_in_documents_is_a_configuration(document: Path, tmp_path: Path) -> None:
    file = tmp_path / "streamdiff.yaml"
    for block in fenced(document, "yaml"):
        file.write_text(block, encoding="utf-8")
        load(file)
        file.write_text(block.replace(":", "x:", 1), encoding="utf-8")
        with pytest.raises(ConfigError):
            load(file)


def environment() -> dict[str, str]:
    """The user's, who has installed the package and nothing else."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
