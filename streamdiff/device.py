"""Which device, and which kind of number, a model runs in: as asked for, or as fits this machine; what it can do."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from streamdiff import clock
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


def own_device(wanted: str) -> torch.device:
    """`pick_device`; of several CUDA devices a rank takes that of its number on this machine, and is bound to it. To be
    called before anything else that may touch a device. Mutates: the thread's current device.

    Raises:
        ConfigError: as `pick_device`.
    """
    found = pick_device(wanted, "model.device")
    if found.type == "cuda" and "LOCAL_RANK" in os.environ:
        found = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    bind(found)
    return found


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype `auto` (float32 on a CPU, bfloat16 elsewhere), `float32` or `bfloat16`.

    Raises:
        ConfigError: another word.
    """
    if wanted not in (AUTO, *_DTYPES):
        raise ConfigError(f"--dtype is {wanted}, but must be {AUTO}, {' or '.join(_DTYPES)}")
    return _DTYPES.get(wanted, torch.float32 if device.type == "cpu" else torch.bfloat16)


def embedded_autoencoder_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which the embedded model's autoencoder runs: bfloat16 on CPUs that have products of it (AVX512_BF16:
    AMD's from Zen 4 on, Intel's Xeons from Sapphire Rapids on), where a chunk takes little more than half the time;
    float32 on others, and on GPUs, where bfloat16 gains nothing for a network so small."""
    native = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


_WARM_UP, _CALLS, _ROUNDS = 3, 5, 3


def seconds_per_call(call: Callable[[], object], device: torch.device) -> float:
    """The device's own time for a `call`, the least of some rounds after a few that do not count: first calls compile,
    plan and allocate. The host waits for it; for the start only."""
    for _ in range(_WARM_UP):
        call()
    return min(_round_s(call, device) for _ in range(_ROUNDS)) / _CALLS


def _round_s(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun_s = clock.monotonic_s()
        for _ in range(_CALLS):
            call()
        return clock.monotonic_s() - begun_s
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(_CALLS):
        call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000
