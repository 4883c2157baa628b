"""A process that waits at its pipe: what it does meanwhile, and what it does then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamdiff.engine.process.ipc import make_pipe, wake

LIMIT_S = 240.0
ROOT = Path(__file__).resolve().parents[3]
# Says on standard output when the module is imported, and when it was told.
WAITS = """
import sys
from pathlib import Path
from streamdiff.engine.process import main
main._SETTLE_S = float(sys.argv[2])
main.wait_as_standby(Path(sys.argv[1]), "this")
print("told", flush=True)
"""


def start(folder: Path, settle_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-u", "-c", WAITS, str(folder), str(settle_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bridge"
    made.mkdir()
    return made


def test_it_imports_before_it_is_told(folder: Path) -> None:
    pipe = make_pipe(folder)
    with start(folder, 0.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("The Zen"), "what importing this module prints"
        wake(pipe)
        assert process.stdout.read().endswith("\ntold\n")
        assert process.wait(LIMIT_S) == 0
    os.close(pipe)
    assert folder.exists(), "it is the engine's now"


@pytest.mark.parametrize("ranks", [1, 3])
def test_telling_cuts_the_wait_short_for_all_who_come(folder: Path, ranks: int) -> None:
    pipe = make_pipe(folder)
    early = [start(folder, 3600.0) for _ in range(ranks - 1)]
    wake(pipe)
    for process in [*early, start(folder, 3600.0)]:
        with process:
            assert process.stdout is not None
            assert process.stdout.read().endswith("told\n")
    os.close(pipe)


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_it_ends_with_the_one_who_could_tell_it(folder: Path, when: str) -> None:
    pipe = make_pipe(folder)
    if when == "before":
        os.close(pipe)
    with start(folder, 3600.0 if when == "before" else 0.0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if when != "before":
            os.close(pipe)
        assert "told" not in process.stdout.read()
        assert process.wait(LIMIT_S) == 0
    assert not folder.exists()
    with start(folder, 0.0) as late:
        assert late.wait(LIMIT_S) == 0, "another rank, that finds nothing any more"
