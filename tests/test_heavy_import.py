"""Heavy imports do not collect garbage, nor does the end of the process, and they leave the collector as it was."""

from __future__ import annotations

import gc
import sys

import pytest

from streamdiff.cli import main
from streamdiff.heavy_import import heavy_import


def test_nothing_is_collected_meanwhile_and_afterwards_it_is_also_where_an_import_fails() -> None:
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), heavy_import():
        assert not gc.isenabled()
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
