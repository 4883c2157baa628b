"""Opens model checkpoints in any layout (safetensors, sharded safetensors, torch files): shapes and dtypes, and single
tensors on demand, memory-mapped; and loads tensors into modules. Files of inputs and results are read by `tensor_file`.

A returned tensor is a view of the mapped file until it is copied or cast, so it must not be written to, and the file
must not be changed in place while it is in use (replacing it by another is fine). A torch file is a pickle, which can
run code when it is opened; it is opened with torch's `weights_only`, and one that needs more than that is refused.
"""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from streamdiff.errors import ConfigError
from streamdiff.models.weight_files import (
    INDEX,
    PICKLES,
    SAFETENSORS,
    USUAL_STEMS,
    fault_list,
    read_object,
    some,
    weights_file,
)

CONTAINERS = ("generator_ema", "generator", "model", "state_dict", "module")
"""Names of what holds the tensors in a file, the preferred first. Which one is right is a fact of the file that its
catalogue entry states; this order is for files without one."""
LORA_CONTAINERS = ("generator_lora", *CONTAINERS)
_ALSO_PREFIXES = ("model", "module")

_PACKED = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Dtypes of quantised weights with scales beside them, which nothing here reads."""


@dataclass
class Checkpoint:
    """The tensors of one container, under the names they are stored by.

    `entries` tell shape and dtype of each; asking reads no weights. `read` gives a tensor on the CPU, memory-mapped:
    not to be written to. Both raise ConfigError where the file that should hold it is missing or damaged. `names` are
    those that count. `path` and `container`, empty if the file has none, are for messages; `config` lies beside the
    weights, if there is one, and `metadata` is what a safetensors file's header says about it.
    """

    path: Path
    entries: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    names: tuple[str, ...]
    container: str = ""
    config: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path} ({self.container})" if self.container else str(self.path)


def open_checkpoint(
    path: Path,
    container: str | None = None,
    *,
    order: Sequence[str] = CONTAINERS,
    names: Sequence[str] = USUAL_STEMS,
) -> Checkpoint:
    """Open a checkpoint: a file (`.safetensors`, `.pt`, `.pth`, `.bin`), the index of several
    (`.safetensors.index.json`), or a folder with one of these, possibly in `transformer`. A folder's `config.json`
    comes along.

    Args:
        container: the one to take from a file with containers. A file without any holds one set of tensors, and is
            taken as it is.
        order: which container to take when `container` is None.
        names: stems of the usual file in a folder, which is taken before others.

    Raises:
        ConfigError: nothing there, several files that could be meant, a damaged file, a pickle that `weights_only`
            refuses, no such container, or several and none of them known.
    """
    in_folder = path.is_dir()
    path = weights_file(path, names) if in_folder else path
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    way, metadata = list[str](), dict[str, str]()
    entries: Mapping[str, Tensor]
    if path.suffix in PICKLES:
        way, entries, found = _choose(path, unpickle(path), container, order)
        container = None if found else container
    elif path.suffix == SAFETENSORS:
        entries, metadata = _mapped(path)
    elif path.name.endswith(INDEX):
        entries = _Shards(path)
    else:
        raise ConfigError(f"{path}: a checkpoint ends in {SAFETENSORS}, {INDEX} or {', '.join(PICKLES)}")
    prefix, counting = _narrow(path, tuple(entries), container, order)
    config = path.parent / "config.json"
    own = read_object(config) if in_folder and config.is_file() else None
    return Checkpoint(path, entries, entries.__getitem__, tuple(counting), ".".join(way + prefix), own, metadata)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by name: for modules so small that all of it is wanted.

    Raises:
        ConfigError: as `open_checkpoint`.
    """
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.names}


# ---- safetensors ---------------------------------------------------------------------------------------------------


def _mapped(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, memory-mapped, and its metadata."""
    try:
        # Not closed by hand: the mapping lives as long as a tensor of it.
        file: Any = safe_open(path, framework="pt", device="cpu")
        tensors, metadata = {name: file.get_tensor(name) for name in sorted(file.keys())}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}{pointer_hint(path)}") from None
    for name, tensor in tensors.items():
        if tensor.dtype in _PACKED:
            raise ConfigError(f"{path}: {name} has dtype {tensor.dtype}, whose numbers mean nothing without others")
    return tensors, metadata


class _Shards(Mapping[str, Tensor]):
    """The tensors of several safetensors files, by the index that says which tensor is in which. A file is opened when
    it is needed: a rank can do without those that hold nothing for it.

    Raises:
        ConfigError: the index is damaged, or leads out of its folder.
    """

    def __init__(self, index: Path) -> None:
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ConfigError(f"{index}: weight_map must lead from tensors' names to files' names")
        for place in sorted(set(places.values())):
            if Path(place).name != place:
                raise ConfigError(f"{index}: {place!r} must be a file in the same folder")
        self._index, self._open = index, dict[Path, dict[str, Tensor]]()
        self._places = {name: index.parent / places[name] for name in sorted(places)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> Tensor:
        path = self._places[name]
        if path not in self._open:
            if not path.is_file():
                raise ConfigError(f"{path}: missing, but {self._index.name} says that it holds {name}")
            self._open[path], _ = _mapped(path)
        if name not in self._open[path]:
            raise ConfigError(f"{path}: has no tensor {name}, though its index says so")
        return self._open[path][name]


# ---- containers ----------------------------------------------------------------------------------------------------


def _choose(
    path: Path, tree: object, container: str | None, order: Sequence[str]
) -> tuple[list[str], dict[str, Tensor], bool]:
    """Go down to the tensors. Returns the way there, the tensors, and whether `container` is on the way."""
    way: list[str] = []
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: holds a {type(tree).__name__} instead of tensors by name")
    while True:
        tensors = {str(key): value.detach() for key, value in tree.items() if isinstance(value, Tensor)}
        inner = {str(key): value for key, value in tree.items() if isinstance(value, Mapping) and _has_tensors(value)}
        wanted = container if container not in way else None
        if tensors and wanted not in inner:
            return way, tensors, container in way
        if wanted is not None and wanted not in inner and inner:
            raise _no_container(path, wanted, sorted(inner))
        key = next((key for key in (wanted, *order) if key in inner), None)
        if key is None:
            elsewhere = f" in any of {', '.join(order)}; there is {', '.join(sorted(inner))}" if inner else ""
            raise ConfigError(f"{path}: no tensors by name{elsewhere}")
        way.append(key)
        tree = inner[key]


def _narrow(
    path: Path, everything: Sequence[str], container: str | None, order: Sequence[str]
) -> tuple[list[str], Sequence[str]]:
    """In a flat file a container is the first part of names, as in `generator_ema.blocks.0...`. Returns what it is
    called, as a list of one or none, and the names that count. `model.` before all names is only a prefix."""
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


def unpickle(path: Path) -> object:
    """What a torch file holds, its tensors mapped into memory.

    Raises:
        ConfigError: it cannot be read, or `weights_only` refuses it.
    """
    if hint := pointer_hint(path):
        raise ConfigError(f"{path}: not a torch file{hint}")
    try:
        tree: object = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class|function)\s+([\w.]+\.[\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise ConfigError(
            f"{path}: holds more than tensors{what}. A pickle can run code when it is opened, so it is opened with "
            "weights_only=True, and torch refuses this one; take a safetensors file, or save the tensors alone"
        ) from None
    except Exception as error:  # of any kind, as torch uses a pickle before it looks whether it is whole
        if "_use_new_zipfile_serialization" in str(error):
            raise ConfigError(
                f"{path}: not a torch file, or one from before torch 1.6, which cannot be mapped into memory; load and "
                "save it again with torch.save, or take a safetensors file"
            ) from error
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")
        raise ConfigError(f"{path}: not a readable torch file: {reason}") from error
    return tree


def pointer_hint(path: Path) -> str:
    """What to say about a file of a few bytes that stands for a large one."""
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
        return " (it is a Git LFS pointer: the weights themselves were not downloaded; `git lfs pull` does it)"
    return ""


def check_fit(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    """Check that `found` has exactly the tensors `wanted`, in their shapes.

    Raises:
        ConfigError: lists how many are missing, unexpected and misshapen, the first few by name.
    """
    faults = fault_list(
        {
            "missing": [name for name in wanted if name not in found],
            "unexpected": [name for name in found if name not in wanted],
            "of another shape": [
                f"{name} {list(found[name].shape)} instead of {list(shape)}"
                for name, shape in wanted.items()
                if name in found and found[name].shape != shape
            ],
        }
    )
    if faults:
        raise ConfigError(f"{path}: of {len(wanted)} tensors expected, {len(found)} found: {faults}")


def load_module(
    module: nn.Module,
    path: Path,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    wanted: tuple[str, ...] = ("",),
) -> None:
    """Give a module on the meta device those of its `tensors` whose names begin with one of `wanted`, for inference.
    `path` is for messages. Mutates: module.

    Raises:
        ConfigError: lists tensors that are missing, unexpected or misshapen (`check_fit`); and those wanted that hold
            NaN or infinity, or are no floating-point numbers.
    """
    check_fit(path, tensors, {name: tensor.shape for name, tensor in module.state_dict().items()})
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(wanted)}
    bad = [name for name, tensor in found.items() if not (tensor.is_floating_point() and tensor.isfinite().all())]
    if bad:
        raise ConfigError(f"{path}: {len(bad)} tensors hold NaN, infinity or no floating-point numbers: {some(bad)}")
    module.load_state_dict({name: each.to(device, dtype) for name, each in found.items()}, strict=False, assign=True)
    module.eval().requires_grad_(False)


# ---- random weights ------------------------------------------------------------------------------------------------


def draw(module: nn.Module, wanted: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights for `module`, drawn on `device` where their names begin with one of `wanted`; the others as they are in
    it."""
    return {
        name: drawn(name, each.shape, device, dtype) if name.startswith(wanted) else each
        for name, each in module.state_dict().items()
    }


def drawn(name: str, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A random tensor in place of a checkpoint's: matrices and convolutions keep the scale of their input, norms are 1,
    biases 0."""
    tensor = torch.empty(shape, device=device, dtype=dtype)
    if name.endswith("bias"):
        return tensor.zero_()
    if len(shape) < 2 or name.endswith("gamma"):
        return tensor.fill_(1)
    fan_in = shape[-1] if name.endswith("scale_shift_table") else prod(shape[1:])
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, fan_in**-0.5, generator=generator)
