"""Loads tensors into a module on the meta device, after checking their names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.json_file import some


def check_fit(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    """Check that `found` has exactly the tensors `wanted`, in their shapes.

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
