"""Which model of the catalogue a checkpoint is, from its file's name and the names of its tensors.

Needs no torch, reads no weights, and opens no pickle: of a torch file only the texts in it are looked at.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import entries as catalogue
from streamdiff.models.catalogue.schema import CatalogueEntry
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.checkpoint.safetensors_header import parse_header
from streamdiff.models.checkpoint.weight_files import INDEX, SAFETENSORS, weights_file
from streamdiff.models.transformer.tensor_names import block_count, recognise, translate

_CONTAINERS = ("generator_ema", "generator")  # that entries of the catalogue name
_MOST_BYTES = 64 * 2**20  # of the pickle in a torch file, which holds names and shapes alone


def entry_of(weights: Path) -> CatalogueEntry:
    """The model whose transformer this file holds; `weights` may be a folder with one.

    Raises:
        ConfigError: it is no Wan transformer, or could be that of several models, which are named, or of none; or which
            file of a folder is meant cannot be told.
    """
    names = _names(weights_file(weights) if weights.is_dir() else weights)
    layout = recognise(names)
    if layout is None:
        raise ConfigError(f"{weights}: holds no transformer of a kind that is known; say whose it is with --model NAME")
    blocks = block_count(translate(names, layout).sources)
    fitting = [entry for entry in catalogue.listed() if _fits(entry, names, blocks)]
    named = _by_file_name(fitting, weights)
    if len(named) == 1:
        return named[0]
    could = ", ".join(entry.name for entry in named) or "none of the catalogue's"
    raise ConfigError(
        f"{weights}: a transformer of {blocks} blocks, whose name does not tell which model it is: it could be "
        f"{could}. Say which with --model NAME"
    )


def _fits(entry: CatalogueEntry, names: Sequence[str], blocks: int) -> bool:
    """Whether the number of blocks and the container fit `entry`. A number that no catalogue architecture has is not
    compared."""
    sizes = catalogue.parts().architectures
    if any(each.blocks == blocks for each in sizes.values()) and sizes[entry.architecture].blocks != blocks:
        return False
    container = None if entry.weights is None else entry.weights.container
    held = {each for each in _CONTAINERS if any(name == each or name.startswith(f"{each}.") for name in names)}
    return container is None or not held or container in held


def _by_file_name(entries: Sequence[CatalogueEntry], weights: Path) -> list[CatalogueEntry]:
    """The `entries` whose published file's path matches most trailing parts of `weights`; all where none matches."""
    best: dict[int, list[CatalogueEntry]] = {0: list(entries)}
    for entry in entries:
        published = (*entry.weights.files, *entry.weights.others) if entry.weights is not None else ()
        alike = max((_alike(Path(file), weights) for file in published), default=0)
        if alike:
            best.setdefault(alike, []).append(entry)
    return best[max(best)]


def _alike(one: Path, other: Path) -> int:
    """How many parts at the end of two paths are the same, but for the file's ending."""
    pairs = zip(reversed(one.with_suffix("").parts), reversed(other.with_suffix("").parts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---- names of tensors ----------------------------------------------------------------------------------------------


def _names(path: Path) -> list[str]:
    """Names of the tensors in a file; for a torch file, all strings of its pickle."""
    if path.name.endswith(INDEX):
        return list(read_object(path).get("weight_map", {}))
    if path.suffix == SAFETENSORS:
        return list(parse_header(path).entries)
    try:
        with zipfile.ZipFile(path) as archive:
            found = next(each for each in archive.infolist() if each.filename.endswith("data.pkl"))
            data = archive.read(found) if found.file_size <= _MOST_BYTES else b""
        return [given for _, given, _ in pickletools.genops(data) if isinstance(given, str)]
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{path}: what it holds cannot be told ({error}); say whose it is with --model NAME"
        ) from None
