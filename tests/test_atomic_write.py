"""What is left, and what is not, when writing ends in the middle."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from streamdiff.atomic_write import exit_on_sigterm, temporary_sibling


@pytest.mark.parametrize(
    ("kind", "error"), [("nothing", None), ("a file", KeyboardInterrupt), ("a folder", KeyboardInterrupt)]
)
def test_what_was_not_moved_away_is_removed(tmp_path: Path, kind: str, error: type[BaseException] | None) -> None:
    def write() -> None:
        with temporary_sibling(tmp_path / "out.mp4") as temporary:
            assert temporary.parent == tmp_path and not temporary.exists()
            if kind == "a file":
                temporary.write_text("half")
            elif kind == "a folder":
                temporary.mkdir()
                (temporary / "00000.png").write_text("half")
            if error is not None:
                raise error

    with nullcontext() if error is None else pytest.raises(error):
        write()
    assert os.listdir(tmp_path) == []


def test_what_was_moved_away_stays(tmp_path: Path) -> None:
    with temporary_sibling(tmp_path / "out.mp4") as temporary:
        temporary.write_text("whole")
        os.replace(temporary, tmp_path / "out.mp4")
    assert os.listdir(tmp_path) == ["out.mp4"]


def test_sigterm_unwinds_and_the_handler_before_comes_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, exit_on_sigterm(), temporary_sibling(tmp_path / "out.mp4") as temporary:
        temporary.write_text("half")
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == before
