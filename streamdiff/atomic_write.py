"""Atomic writes: a temporary name beside the target, moved into place when complete; clean-up on SIGTERM."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamdiff.errors import ConfigError


def check_parent(target: Path) -> None:
    """Find out early whether anything could be written beside `target`.

    Raises:
        ConfigError: its folder is not there or cannot be written to.
    """
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"the folder {parent} of {target.name} does not exist; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder {parent} of {target.name} cannot be written to; choose another")


def check_free(target: Path) -> None:
    """Raises ConfigError if there is something at `target` already, also a link that leads nowhere."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists; name another, or give --overwrite to replace it")


@contextmanager
def temporary_sibling(target: Path) -> Iterator[Path]:
    """A free name in the folder of `target`, for a file or a folder that is moved there when it is whole. What still
    has that name at the end is removed."""
    temporary = target.absolute().with_name(f".streamdiff-{secrets.token_hex(6)}.part")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """A polite request to end (SIGTERM) leaves nothing half-written either, as Ctrl-C does: it raises SystemExit.

    Mutates: the process's handler, until the end. Only for the main thread.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
