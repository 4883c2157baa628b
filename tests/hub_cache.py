"""Files laid out as the hub's client lays out its cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def lay(cache: Path, repo: str, parts: Mapping[str, Path]) -> None:
    """A repository in the hub's cache, its files links to `parts`."""
    folder, commit = cache / f"models--{repo.replace('/', '--')}", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for name, path in parts.items():
        target = folder / "snapshots" / commit / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
