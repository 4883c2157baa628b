"""Named tensors in safetensors files, as commands take and give them: checked in full when read, whole when written."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamdiff.errors import ConfigError

SUFFIX = ".safetensors"


def read_tensor(path: Path, name: str, *layouts: str) -> Tensor:
    """The tensor `name` of a safetensors file, on the CPU, in the dtype it is stored in.

    Args:
        layouts: the shapes that it may have, as their axes: `"C, F, h, w"`. They differ in length.

    Raises:
        ConfigError: no such file, not a safetensors file, no tensor of that name, another number of axes, an axis of
            length 0, no floating-point numbers, or values that are not finite.
    """
    allowed = " or ".join(f"[{layout}]" for layout in layouts)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a safetensors file with `{name}` {allowed}")
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if name not in names:
                held = ", ".join(names[:5]) or "nothing"
                raise ConfigError(f"{path} has no tensor `{name}`; it holds {held}; expected `{name}` {allowed}")
            tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from None
    where = f"{path}: `{name}`"
    if tensor.ndim not in [layout.count(",") + 1 for layout in layouts] or 0 in tensor.shape:
        raise ConfigError(f"{where} has shape {list(tensor.shape)}; expected {allowed}, no axis empty")
    if not tensor.is_floating_point():
        raise ConfigError(f"{where} is {_dtype(tensor)}; expected float32, float16 or bfloat16")
    if bad := int((~tensor.isfinite()).sum()):
        raise ConfigError(f"{where}: {bad:,} of {tensor.numel():,} values are NaN or infinite; all must be finite")
    return tensor


def check_target(path: Path) -> None:
    """Find out early whether `write_tensor` would refuse `path`.

    Raises:
        ConfigError: another ending, a folder, or a parent folder that is not there or cannot be written to.
    """
    if path.suffix != SUFFIX or path.is_dir():
        raise ConfigError(f"{path} must be a file whose name ends in {SUFFIX}")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"the folder {parent} of {path.name} does not exist; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder {parent} of {path.name} cannot be written to; choose another")


def write_tensor(path: Path, name: str, tensor: Tensor) -> None:
    """Write one tensor; what is at `path` is whole, or what was there before.

    Raises:
        ConfigError: as `check_target`.
    """
    check_target(path)
    temporary = path.absolute().with_name(f".streamdiff-{secrets.token_hex(6)}.part")
    try:
        temporary.touch()
        usual = temporary.stat().st_mode
        save_file({name: tensor.contiguous()}, temporary)
        temporary.chmod(usual)  # safetensors makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix(f"{torch.__name__}.")
