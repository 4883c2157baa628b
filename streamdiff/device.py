"""Which device, and which kind of number, a model runs in: as asked for, or as fits this machine."""

from __future__ import annotations

import torch

from streamdiff.errors import ConfigError

AUTO = "auto"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(wanted: str, name: str = "--device") -> torch.device:
    """The device `auto` (CUDA where there is one, else the CPU), `cpu` or `cuda`. `name` is what the message calls it.

    Raises:
        ConfigError: another word, or CUDA where there is none.
    """
    if wanted not in (AUTO, "cpu", "cuda"):
        raise ConfigError(f"{name} is {wanted}, but must be auto, cpu or cuda")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and found == "cpu":
        raise ConfigError(f"{name} is cuda, but torch sees no CUDA device; use auto or cpu")
    return torch.device(found if wanted == AUTO else wanted)


def bind(device: torch.device) -> None:
    """Make a numbered CUDA `device` the calling thread's current one: there go streams, events, graphs and contexts for
    which none is named. Every thread begins with device 0. Mutates: the thread's current device."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype `auto` (float32 on a CPU, bfloat16 elsewhere), `float32` or `bfloat16`.

    Raises:
        ConfigError: another word.
    """
    if wanted not in (AUTO, *_DTYPES):
        raise ConfigError(f"--dtype is {wanted}, but must be {AUTO}, {' or '.join(_DTYPES)}")
    return _DTYPES.get(wanted, torch.float32 if device.type == "cpu" else torch.bfloat16)
