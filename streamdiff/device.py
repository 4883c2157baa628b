"""Which device, and which kind of number, a model runs in: as asked for, or as fits this machine; what it can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor

from streamdiff.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


_LIMITS = {"cgroup": ("memory.limit_in_bytes",), "cgroup2": ("memory.max", "memory.high")}
_USED = {"cgroup": ("memory.usage_in_bytes", "total_inactive_file"), "cgroup2": ("memory.current", "inactive_file")}


def host_memory(process: Path = Path("/proc/self")) -> tuple[int, int]:
    """Bytes of host memory that are free for this process, and that there are: the least of the machine's and of each
    of its cgroups', as containers have them. `process` is its folder in /proc.

    Files that a cgroup has read and does not use (`inactive_file`) are free memory, as for the machine.
    """
    machine = psutil.virtual_memory()
    free, total = [machine.available], [machine.total]
    for kind, folder in _cgroups(process):
        limits = [int(text) for name in _LIMITS[kind] if (text := _text(folder / name)).isdigit()]
        if (limit := min(limits, default=machine.total)) < machine.total:
            used, unused = _USED[kind]
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            free.append(max(0, limit - int(_text(folder / used) or 0) + int(stat.get(unused, 0))))
            total.append(limit)
    return min(free), min(total)


def _text(file: Path) -> str:
    """What a cgroup's file says; empty where there is none: some sandboxes show a few of them, and groups are
    removed."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _cgroups(process: Path) -> Iterator[tuple[str, Path]]:
    """Kind (type of its file system) and folder of each cgroup that may limit the process's memory, and of those above
    it, as far as they are to be seen here."""
    if not (process / "cgroup").exists():  # no Linux
        return
    paths = {}
    for line in (process / "cgroup").read_text(errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in (process / "mountinfo").read_text(errors="surrogateescape").splitlines():
        mounted, _, (kind, *_, options) = (part.split() for part in line.partition(" - "))  # a source may be empty
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            root, mount = mounted[3], Path(mounted[4])
            # In a container the path may be one of the host's, of which nothing but the mount is seen.
            below = os.path.relpath(paths[kind], root)
            folder = mount if below.startswith("..") else mount / below
            for each in (folder, *folder.parents):
                if each == mount or mount in each.parents:
                    yield kind, each


def pick_device(wanted: str, name: str = "--device") -> torch.device:
    """The device `auto` (CUDA where there is one, else the CPU), `cpu` or `cuda`; ConfigError for CUDA where there is
    none. `name` is what the message calls it."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and found == "cpu":
        raise ConfigError(f"{name} is cuda, but torch sees no CUDA device; use auto or cpu")
    return torch.device(found if wanted == "auto" else wanted)


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
    """The dtype `auto` (float32 on a CPU, bfloat16 elsewhere), `float32` or `bfloat16`."""
    return _DTYPES.get(wanted, torch.float32 if device.type == "cpu" else torch.bfloat16)


def embedded_autoencoder_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which the embedded model's autoencoder runs: bfloat16 on CPUs that have products of it (AVX512_BF16:
    AMD's from Zen 4 on, Intel's Xeons from Sapphire Rapids on), where a chunk takes little more than half the time;
    float32 on others, and on GPUs, where bfloat16 gains nothing for a network so small."""
    native = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values` in host memory on `device`; from memory that is not pinned the host would wait for the copy."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


@contextmanager
def side_stream(device: torch.device, after_current: bool = False) -> Iterator[None]:
    """On a GPU, run on a stream of its own and wait for it on this thread, so that other streams' work continues.

    Args:
        after_current: begin after the work of this thread's current stream, such as copies of weights.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    if after_current:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


_WARM_UP, _CALLS, _ROUNDS = 3, 5, 3


def seconds_per_call(call: Callable[[], object]) -> float:
    """The current CUDA device's own time for a `call`, the least of some rounds after a few that do not count: first
    calls compile, plan and allocate. The host waits for it; for the start only."""
    for _ in range(_WARM_UP):
        call()
    return min(_round_s(call) for _ in range(_ROUNDS)) / _CALLS


def _round_s(call: Callable[[], object]) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(_CALLS):
        call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000
