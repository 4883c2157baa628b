"""Finds the file with a model's weights in a folder. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamdiff.errors import ConfigError

SAFETENSORS, INDEX, PICKLES = ".safetensors", ".safetensors.index.json", (".pt", ".pth", ".bin")
"""Endings of a file, of the index of several, and of torch's files."""
USUAL_STEMS = ("diffusion_pytorch_model",)


def weights_file(folder: Path, stems: Sequence[str] = USUAL_STEMS) -> Path:
    """The file to open of those in a folder, or in `transformer` in it: one of these stems, else the only one.

    Raises:
        ConfigError: there is none, or several could be meant.
    """
    if not _weight_files(folder) and (folder / "transformer").is_dir():
        folder = folder / "transformer"
    files = _weight_files(folder)
    for stem in stems:
        for ending in (INDEX, SAFETENSORS, *PICKLES):
            if folder / (stem + ending) in files:
                return folder / (stem + ending)
    for endings in ((INDEX,), (SAFETENSORS,), PICKLES):
        if found := [path for path in files if path.name.endswith(endings)]:
            if len(found) == 1:
                return found[0]
            some = ", ".join(path.name for path in found[:4])
            raise ConfigError(f"{folder}: has {len(found)} files that could be meant ({some}); name one of them")
    raise ConfigError(f"{folder}: has no weights ({SAFETENSORS}, {INDEX} or {', '.join(PICKLES)})")


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith((SAFETENSORS, INDEX, *PICKLES)))
