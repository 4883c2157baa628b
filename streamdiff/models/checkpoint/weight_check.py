"""Whether tensors from a file are the ones that a module wants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.json_file import some


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
        f"{len(names)} {what} ({some(names)})"
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
        raise ConfigError(f"{path}: {len(bad)} tensors hold NaN, infinity or no floating-point numbers: {some(bad)}")
