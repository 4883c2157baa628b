"""Atomic writes: a temporary name beside the target, moved into place when complete; clean-up on SIGTERM; and locks of
files and folders that one process uses at a time."""

from __future__ import annotations

import fcntl
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


def lock_of(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """A descriptor that holds the lock of a file or a folder until it is closed, or the process ends in any way; None:
    another process holds it, or there is no such path. `flags`: how it is opened.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
    """
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


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
