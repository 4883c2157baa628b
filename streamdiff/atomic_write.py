"""Atomic writes: a temporary name beside the target, moved into place when complete; clean-up on SIGTERM; locks of
files and folders that one process uses at a time; and whether a disk has room."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from streamdiff.errors import ConfigError

LEAST_FREE_BYTES = 256 * 2**20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(folder: Path) -> None:
    """Raises OSError (ENOSPC) where the disk of a folder has less free than what a server leaves to others, such as the
    system's log: LEAST_FREE_BYTES, or a twentieth of a smaller disk."""
    disk = shutil.disk_usage(folder)
    kept_bytes = min(LEAST_FREE_BYTES, disk.total // 20)
    if disk.free < kept_bytes:
        why = f"No space left: {disk.free / 1e6:.1f} MB are free, and {kept_bytes / 1e6:.1f} MB are left to others"
        raise OSError(errno.ENOSPC, why, str(folder))


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


def open_private(path: Path) -> BinaryIO:
    """A new file that only its user can read, to be written. Raises OSError."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


@contextmanager
def temporary_sibling(target: Path) -> Iterator[Path]:
    """A free name in the folder of `target`, for a file or a folder that is moved there when it is whole. What still
    has that name at the end is removed. An OSError about it, or about no room on the disk, names `target`."""
    temporary = target.absolute().with_name(f".streamdiff-{secrets.token_hex(6)}.part")
    try:
        yield temporary
    except OSError as error:
        unnamed = error.filename is None and error.errno in NO_ROOM
        if unnamed or str(error.filename).startswith(str(temporary)):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def lock_of(path: Path) -> int | None:
    """A descriptor that holds the lock of a file or a folder until it is closed, or the process ends in any way; None:
    another process holds it, or there is no such path.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
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
