"""Disks without room."""

from __future__ import annotations

import contextlib
from pathlib import Path


def fill(disk: Path) -> Path:
    """Leave no room on a disk, but for what files that are there have taken already."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        for piece in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(piece))
    return filler
