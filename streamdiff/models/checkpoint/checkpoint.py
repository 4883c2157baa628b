"""Checkpoint files: what is in them, and single tensors of them. Nothing is read that is not asked for.

Files are memory-mapped. A tensor that is handed out lies in the file's pages until somebody copies or casts it, so it
must not be written to, and the file must not be changed in place while it is in use (replacing it by another is fine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.checkpoint.torch_file import pointer_hint, unpickle

SAFETENSORS, INDEX, PICKLES = ".safetensors", ".safetensors.index.json", (".pt", ".pth", ".bin")
CONTAINERS = ("generator_ema", "generator", "model", "state_dict", "module")
"""Names of what holds the tensors in a file, the preferred first. Which one is right is a fact of the file that its
catalogue entry states; this order is for files without one."""
LORA_CONTAINERS = ("generator_lora", *CONTAINERS)
_ALSO_PREFIXES = ("model", "module")
_USUAL = "diffusion_pytorch_model"
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


@dataclass
class Checkpoint:
    """The tensors of one container, under the names they are stored by: `names` of those in `store`. `path` and
    `container`, empty if the file has none, are for messages; `config` lies beside the weights, if there is one."""

    path: Path
    store: Store
    names: tuple[str, ...]
    container: str = ""
    config: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.path} ({self.container})" if self.container else str(self.path)

    def entry(self, name: str) -> Entry:
        """Shape and dtype of a tensor; reads no weights.

        Raises:
            ConfigError: the file that should hold it is missing or damaged.
        """
        return self.store.entry(name)

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, memory-mapped. Not to be written to.

        Raises:
            ConfigError: as `entry`.
        """
        return self.store.read(name)

    def metadata(self) -> Mapping[str, str]:
        """What the file says about itself: the header of a safetensors file, otherwise nothing."""
        return self.store.metadata()


def open_checkpoint(
    path: Path,
    container: str | None = None,
    *,
    order: Sequence[str] = CONTAINERS,
    names: Sequence[str] = (_USUAL,),
    old: bool = False,
) -> Checkpoint:
    """Open a checkpoint: a file (`.safetensors`, `.pt`, `.pth`, `.bin`), the index of several
    (`.safetensors.index.json`), or a folder with one of these, possibly in `transformer`. A folder's `config.json`
    comes along.

    Args:
        container: the one to take from a file with containers. A file without any holds one set of tensors, and is
            taken as it is.
        order: which container to take when `container` is None.
        names: stems of the usual file in a folder, which is taken before others.
        old: take a torch file from before torch 1.6 too, which cannot be mapped: all of it is read.

    Raises:
        ConfigError: nothing there, several files that could be meant, a damaged file, a pickle that `weights_only`
            refuses, no such container, or several and none of them known.
    """
    in_folder = path.is_dir()
    path = _weights_file(path, names) if in_folder else path
    store, way = _open_file(path, old=old), list[str]()
    config = path.parent / "config.json"
    own = read_object(config) if in_folder and config.is_file() else None
    if isinstance(store, Mapping):
        way, store, found = _choose(path, store, container, order)
        container = None if found else container
    prefix, counting = _narrow(path, store, container, order)
    return Checkpoint(path, store, tuple(counting), ".".join(way + prefix), own)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by name: for modules so small that all of it is wanted. As `open_checkpoint`, with `old`.

    Raises:
        ConfigError: as `open_checkpoint`.
    """
    checkpoint = open_checkpoint(path, old=True)
    return {name: checkpoint.read(name) for name in checkpoint.names}


# ---- files ---------------------------------------------------------------------------------------------------------


def _open_file(path: Path, *, old: bool) -> Store | Mapping[Any, object]:
    """The tensors of a file, of the files behind an index, or what a torch file holds; `old`: see `unpickle`.

    Raises:
        ConfigError: no such file, one of another kind, or as `_Safetensors` and `unpickle`.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    if path.suffix in PICKLES:
        tree = unpickle(path, old=old)
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{path}: holds a {type(tree).__name__} instead of tensors by name")
        return tree
    if not path.name.endswith((SAFETENSORS, INDEX)):
        raise ConfigError(f"{path}: a checkpoint ends in {SAFETENSORS}, {INDEX} or {', '.join(PICKLES)}")
    return _Safetensors(path)


class _Safetensors:
    """A safetensors file, or several and the index that says which tensor is in which. A file of several is opened when
    it is needed: a rank can do without those that hold nothing for it.

    Raises:
        ConfigError: a file cannot be read as one; or the index is damaged, or leads out of its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._open = path, dict[Path, Any]()
        if path.suffix == SAFETENSORS:
            self._places = dict.fromkeys(sorted(self._file(path).keys()), path)
            return
        places = read_object(path).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ConfigError(f"{path}: weight_map must lead from tensors' names to files' names")
        for place in sorted(set(places.values())):
            if Path(place).name != place:
                raise ConfigError(f"{path}: {place!r} must be a file in the same folder")
        self._places = {name: path.parent / places[name] for name in sorted(places)}

    def names(self) -> Sequence[str]:
        return list(self._places)

    def entry(self, name: str) -> Entry:
        path = self._places[name]
        if path not in self._open and not path.is_file():
            raise ConfigError(f"{path}: missing, but {self._path.name} says that it holds {name}")
        try:
            found = self._file(path).get_slice(name)
        except SafetensorError:
            raise ConfigError(f"{path}: has no tensor {name}, though its index says so") from None
        if (kind := found.get_dtype()) not in _DTYPES:
            raise ConfigError(f"{path}: {name} has dtype {kind}; known are {', '.join(_DTYPES)}")
        return Entry(tuple(found.get_shape()), _DTYPES[kind])

    def read(self, name: str) -> Tensor:
        self.entry(name)
        tensor: Tensor = self._file(self._places[name]).get_tensor(name)
        return tensor

    def metadata(self) -> Mapping[str, str]:
        return {} if self._path not in self._open else self._open[self._path].metadata() or {}

    def _file(self, path: Path) -> Any:
        """Never closed by hand: the mapping must live as long as any tensor of it."""
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: not a readable safetensors file: {error}{pointer_hint(path)}") from None
        return self._open[path]


class _Loaded:
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


# ---- folders -------------------------------------------------------------------------------------------------------


def _weights_file(folder: Path, stems: Sequence[str]) -> Path:
    """The file to open of those in a folder, or in `transformer` in it."""
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


# ---- containers ----------------------------------------------------------------------------------------------------


def _choose(
    path: Path, tree: Mapping[Any, object], container: str | None, order: Sequence[str]
) -> tuple[list[str], _Loaded, bool]:
    """Go down to the tensors. Returns the way there, the tensors, and whether `container` is on the way."""
    way: list[str] = []
    while True:
        tensors = {str(key): value for key, value in tree.items() if isinstance(value, Tensor)}
        inner = {str(key): value for key, value in tree.items() if isinstance(value, Mapping) and _has_tensors(value)}
        wanted = container if container not in way else None
        if tensors and wanted not in inner:
            return way, _Loaded(tensors), container in way
        if wanted is not None and wanted not in inner and inner:
            raise _no_container(path, wanted, sorted(inner))
        key = next((key for key in (wanted, *order) if key in inner), None)
        if key is None:
            elsewhere = f" in any of {', '.join(order)}; there is {', '.join(sorted(inner))}" if inner else ""
            raise ConfigError(f"{path}: no tensors by name{elsewhere}")
        way.append(key)
        tree = inner[key]


def _narrow(path: Path, store: Store, container: str | None, order: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """In a flat file a container is the first part of names, as in `generator_ema.blocks.0...`. Returns what it is
    called, as a list of one or none, and the names that count. `model.` before all names is only a prefix."""
    everything = store.names()
    inside = {key: [name for name in everything if name.startswith(f"{key}.")] for key in (container, *order) if key}
    full = [key for key, names in inside.items() if any("blocks." in name for name in names)]
    whole = bool(full) and len(inside[full[0]]) == len(everything)
    if not full or (whole and full[0] in _ALSO_PREFIXES):
        return [], everything
    if container is not None and container not in full:
        raise _no_container(path, container, full)
    return [full[0]], inside[full[0]]


def _has_tensors(tree: Mapping[Any, object]) -> bool:
    return any(_has_tensors(v) if isinstance(v, Mapping) else isinstance(v, Tensor) for v in tree.values())


def _no_container(path: Path, wanted: str, found: Sequence[str]) -> ConfigError:
    return ConfigError(f"{path}: has no container {wanted!r}; there is {', '.join(found)}")
