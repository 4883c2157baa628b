"""Heavy imports do not collect garbage, nor does the end of the process, and they leave the collector as it was."""

from __future__ import annotations

import gc
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


def test_what_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), heavy_import():
        __import__("no_such_module_anywhere")
    assert gc.isenabled()


@pytest.mark.slow
def test_the_console_script_ends_without_a_look_at_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["streamdiff", "--version"])
    kept: list[object] = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    with pytest.raises(SystemExit):
        main.run()
    assert gc.get_freeze_count() >= before + len(kept)
