"""Heavy imports do not collect garbage, nor does the end of the process, and they leave the collector as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from streamdiff.cli import main
from streamdiff.heavy_import import heavy_import


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that keeps whether garbage was collected while it was imported."""
    (tmp_path / "looks_at_gc.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "looks_at_gc", raising=False)
    return "looks_at_gc"


def test_nothing_is_collected_meanwhile_and_afterwards_it_is(seen: str) -> None:
    assert gc.isenabled()
    with heavy_import():
        module = __import__(seen)
    assert not module.COLLECTS and gc.isenabled()


def test_the_process_ends_without_a_look_at_what_was_imported() -> None:
    """Functions registered earlier run later: this one after the collector was told."""
    program = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 10_000))
from streamdiff.heavy_import import heavy_import
for _ in range(2):
    with heavy_import():
        kept = [[] for _ in range(10_001)]
print(gc.get_freeze_count())
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["0", "True"]


@pytest.mark.slow
def test_the_console_script_ends_without_a_look_at_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["streamdiff", "--version"])
    kept: list[object] = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    with pytest.raises(SystemExit):
        main.run()
    assert gc.get_freeze_count() >= before + len(kept)
