"""Tensors from a file of weights, memory-mapped, and the check that they are the ones a module wants.

Reads `.safetensors`, and `.pth`/`.pt` with plain tensors only (`weights_only`): no code in a file is ever run.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamdiff.errors import ConfigError

CONTAINERS = ("state_dict", "model")
"""Keys under which some files keep what others keep at the top."""
_SHOWN = 3


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by name. Values stay on disk until they are used, but for `.pth` files in torch's format
    of before 2020, which cannot be mapped.

    Raises:
        ConfigError: no such file, another ending, a damaged file, or one that holds something else than tensors.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file; weights are a .safetensors, .pth or .pt file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix not in (".pth", ".pt"):
        raise ConfigError(f"{path} ends in {path.suffix!r}; weights are a .safetensors, .pth or .pt file")
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"{path} cannot be read as a file of plain tensors: {reason}") from None
    return _flat(path, tree)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from None


def _flat(path: Path, tree: Any) -> dict[str, Tensor]:
    for key in CONTAINERS:
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
            break
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}, not tensors by name")
    others = [str(name) for name, value in tree.items() if not isinstance(value, Tensor)]
    if others or not tree:
        held = f"{len(others)} entries that are no tensors: {shown(others)}" if others else "nothing"
        raise ConfigError(f"{path} holds {held}; expected tensors by name, or those under {' or '.join(CONTAINERS)}")
    return tree


def check_fit(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    """That `found` has the tensors `wanted`, no others, and in their shapes.

    Raises:
        ConfigError: lists how many are missing, unexpected and misshapen, the first few by name.
    """
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    misshapen = [
        f"{name} {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    faults = [
        f"{len(names)} {what} ({shown(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if faults:
        raise ConfigError(f"{path}: of {len(wanted)} tensors expected, {len(found)} found: {'; '.join(faults)}")


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """That all values are numbers; reads them all.

    Raises:
        ConfigError: lists the tensors that hold NaN or infinity, or that are no floating-point numbers.
    """
    bad = [name for name, tensor in tensors.items() if not (tensor.is_floating_point() and tensor.isfinite().all())]
    if bad:
        raise ConfigError(f"{path}: {len(bad)} tensors hold NaN, infinity or no floating-point numbers: {shown(bad)}")


def shown(names: Iterable[str]) -> str:
    """The first few of `names`."""
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
