"""Files of tensors, opened without reading any: one safetensors file, several behind an index, or a torch file.

safetensors first. A torch file is a pickle, which can run code when it is opened; it is opened with torch's
`weights_only`, and one that needs more than that is refused.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.json_file import read_object

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SAFETENSORS, INDEX, PICKLES = ".safetensors", ".safetensors.index.json", (".pt", ".pth", ".bin")
_OLD_START = b"\x80\x02"
# What torch's reader raises, as it does not look whether a pickle is whole before it uses it.
_DAMAGED = (
    *(RuntimeError, EOFError, OSError, ValueError, LookupError),
    *(AssertionError, AttributeError, TypeError, struct.error),
)


class Entry(NamedTuple):
    """What is known about a stored tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Store(Protocol):
    """Tensors by name, in one file or several."""

    def names(self) -> Sequence[str]:
        """All of them, in no particular order."""

    def entry(self, name: str) -> Entry:
        """Shape and dtype; reads no weights."""

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, memory-mapped. Not to be written to."""

    def metadata(self) -> Mapping[str, str]:
        """What the file says about itself."""


class SafetensorsFile:
    """One safetensors file.

    Raises:
        ConfigError: it cannot be read as one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Never closed by hand: the mapping must live as long as any tensor of it.
            file: Any = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file: {error}{_pointer_hint(path)}") from None
        self._file = file
        self._names: frozenset[str] = frozenset(file.keys())

    def names(self) -> Sequence[str]:
        return sorted(self._names)

    def entry(self, name: str) -> Entry:
        if name not in self._names:
            raise ConfigError(f"{self.path}: has no tensor {name}, though its index says so")
        found = self._file.get_slice(name)
        kind = found.get_dtype()
        if kind not in _DTYPES:
            raise ConfigError(f"{self.path}: {name} has dtype {kind}; known are {', '.join(_DTYPES)}")
        return Entry(tuple(found.get_shape()), _DTYPES[kind])

    def read(self, name: str) -> Tensor:
        self.entry(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def metadata(self) -> Mapping[str, str]:
        return self._file.metadata() or {}


class Shards:
    """Several safetensors files and the index that says which tensor is in which. A file is opened when it is needed:
    a rank can do without those that hold nothing for it.

    Raises:
        ConfigError: the index is damaged, or leads out of its folder.
    """

    def __init__(self, index: Path) -> None:
        self.index = index
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ConfigError(f"{index}: weight_map must lead from tensors' names to files' names")
        for place in sorted(set(places.values())):
            if Path(place).name != place:
                raise ConfigError(f"{index}: {place!r} must be a file in the same folder")
        self._places: dict[str, str] = places
        self._open: dict[str, SafetensorsFile] = {}

    def names(self) -> Sequence[str]:
        return sorted(self._places)

    def entry(self, name: str) -> Entry:
        return self._shard(name).entry(name)

    def read(self, name: str) -> Tensor:
        return self._shard(name).read(name)

    def metadata(self) -> Mapping[str, str]:
        return {}

    def _shard(self, name: str) -> SafetensorsFile:
        place = self._places[name]
        if place not in self._open:
            path = self.index.parent / place
            if not path.is_file():
                raise ConfigError(f"{path}: missing, but {self.index.name} says that it holds {name}")
            self._open[place] = SafetensorsFile(path)
        return self._open[place]


class Loaded:
    """Tensors of a file that torch has mapped."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def entry(self, name: str) -> Entry:
        return Entry(tuple(self._tensors[name].shape), self._tensors[name].dtype)

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def metadata(self) -> Mapping[str, str]:
        return {}


def open_file(path: Path, *, old: bool = False) -> Store | Mapping[Any, object]:
    """The tensors of a file, of the files behind an index, or what a torch file holds; `old`: see `unpickle`.

    Raises:
        ConfigError: no such file, one of another kind, or as the classes here and `unpickle`.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    if path.suffix == SAFETENSORS:
        return SafetensorsFile(path)
    if path.suffix in PICKLES:
        tree = unpickle(path, old=old)
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{path}: holds a {type(tree).__name__} instead of tensors by name")
        return tree
    if not path.name.endswith(INDEX):
        raise ConfigError(f"{path}: a checkpoint ends in {SAFETENSORS}, {INDEX} or {', '.join(PICKLES)}")
    return Shards(path)


def unpickle(path: Path, *, old: bool = False) -> object:
    """What a torch file holds, its tensors mapped into memory.

    Args:
        old: take a file from before torch 1.6 too, which cannot be mapped; all of it is then read.

    Raises:
        ConfigError: it cannot be read, or `weights_only` refuses it.
    """
    if hint := _pointer_hint(path):
        raise ConfigError(f"{path}: not a torch file{hint}")
    try:
        mapped = not (old and _is_old(path))
        tree: object = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class|function)\s+([\w.]+\.[\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise ConfigError(
            f"{path}: holds more than tensors{what}. A pickle can run code when it is opened, so it is opened with "
            "weights_only=True, and torch refuses this one; take a safetensors file, or save the tensors alone"
        ) from None
    except _DAMAGED as error:
        if "_use_new_zipfile_serialization" in str(error):
            raise ConfigError(
                f"{path}: not a torch file, or one from before torch 1.6, which cannot be mapped into memory; load and "
                "save it anew with torch.save, or take a safetensors file"
            ) from None
        raise ConfigError(f"{path}: not a readable torch file: {_reason(error)}") from None
    return tree


def _is_old(path: Path) -> bool:
    """Whether it begins as torch's files did before they were zip archives: with a pickle."""
    with path.open("rb") as file:
        return file.read(len(_OLD_START)) == _OLD_START


def _reason(error: Exception) -> str:
    """The first line of what torch says, which can be nothing, or a bare number."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


def _pointer_hint(path: Path) -> str:
    """What to say about a file of a few bytes that stands for a large one."""
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
        return " (it is a Git LFS pointer: the weights themselves were not downloaded; `git lfs pull` does it)"
    return ""
