"""The files of states that are swapped out: they have no name, and are found by the processes that have them open."""

from __future__ import annotations

from pathlib import Path


def swap_files(folder: Path) -> list[Path]:
    """Those in a folder, of this process and others of the same user, as paths below `/proc`, largest first."""
    found: dict[str, Path] = {}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(descriptor.readlink())
        except OSError:  # ended, or somebody else's
            continue
        if target.startswith(f"{folder}/") and target.endswith("(deleted)"):
            found[target] = descriptor
    return sorted(found.values(), key=lambda path: path.stat().st_size, reverse=True)


def damage(file: Path) -> None:
    """Change the last byte."""
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([last[0] ^ 1]))
