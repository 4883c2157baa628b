"""Which device and dtype a word means. `auto` is also used, on this machine's own device, by every other test."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from streamdiff.config import ModelConfig
from streamdiff.device import embedded_autoencoder_dtype, host_memory, pick_device, pick_dtype, seconds_per_call
from streamdiff.errors import ConfigError
from streamdiff.models.loader import ModelLoader
from streamdiff.pipeline.runner.graphs import compile_fault
from tests.pipeline.device import Device, Event

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("there", "wanted", "picked"), [(False, "auto", CPU), (True, "auto", CUDA), (True, "cpu", CPU)]
)
def test_auto_takes_cuda_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, there: bool, wanted: str, picked: torch.device
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device(wanted) == picked


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError):
        pick_device("cuda", "model.device")


V1 = "9:memory:{path}\n1:cpu:/\n0::/\n", "33 2 0:3{root} {mount} rw - cgroup cgroup rw,memory\n"
V2 = "0::{path}\n", "33 2 0:3{root} {mount} rw - cgroup2 cgroup rw\n"


@pytest.mark.parametrize(("version", "limit_file"), [(V1, ""), (V2, "memory.max"), (V2, "memory.high")])
@pytest.mark.parametrize(
    ("path", "root", "own"),
    [
        ("/a/b", "/", "a/b"),  # on the machine itself
        ("/", "/", ""),  # in a container with a name space of its own
        ("/docker/1", "/docker/1", ""),  # in one without
        ("/docker/1/b", "/docker/1", "b"),
        ("/../1", "/", ""),  # where the path is that of another name space
    ],
)
@pytest.mark.parametrize("above", [False, True])
def test_free_memory_is_the_least_of_the_machines_and_every_cgroups(
    tmp_path: Path, version: tuple[str, str], limit_file: str, path: str, root: str, own: str, above: bool
) -> None:
    """The limit stands in the process's cgroup, or in the highest one that is seen."""
    process, mount = tmp_path / "proc", tmp_path / "cgroup"
    groups = [mount / own, *(each for each in (mount / own).parents if mount in (each, *each.parents))]
    limit, used, inactive = 1_000_000_000, 700_000_000, 50_000_000
    for folder in groups:
        folder.mkdir(parents=True, exist_ok=True)
        is_limited = folder == (groups[-1] if above else groups[0])
        if version is V1:
            (folder / "memory.limit_in_bytes").write_text(f"{limit if is_limited else 9223372036854771712}\n")
            (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {inactive}\n")
        elif is_limited or folder != mount:  # the root has no such files
            for name in ("memory.max", "memory.high"):
                (folder / name).write_text(f"{limit if is_limited and name == limit_file else 'max'}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    process.mkdir()
    (process / "cgroup").write_text(version[0].format(path=path))
    mounts = "32 2 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" + version[1]
    (process / "mountinfo").write_text(mounts.format(root=f" {root}", mount=mount))
    assert host_memory(process) == (limit - used + inactive, limit)


def test_cgroups_that_show_only_some_of_their_files_limit_memory_too(tmp_path: Path) -> None:
    """As sandboxes do; and one mount has no source, and a name that is no UTF-8."""
    (tmp_path / "a").mkdir()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.high").write_text("")
    (tmp_path / "a" / "memory.max").write_text("max\n")
    (tmp_path / "cgroup").write_text("0::/a\n")
    mounts = "31 2 0:1 / /\udcff rw - tmpfs  rw\n" + V2[1].format(root=" /", mount=tmp_path)
    (tmp_path / "mountinfo").write_text(mounts, errors="surrogateescape")
    assert host_memory(tmp_path) == (1_000_000, 1_000_000)


def test_dtypes() -> None:
    assert pick_dtype("auto", CPU) == pick_dtype("float32", CUDA) == torch.float32
    assert pick_dtype("auto", CUDA) == pick_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_embedded_autoencoder_has_bfloat16_where_a_cpu_multiplies_in_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    loader = ModelLoader(ModelConfig(), CPU)
    assert embedded_autoencoder_dtype(CPU) == loader.decoder_dtype == dtype
    assert embedded_autoencoder_dtype(CUDA) == torch.float32


@pytest.mark.parametrize(
    ("triton", "compiler", "capability", "told"),
    [
        (True, "gcc", (9, 0), None),
        (True, "clang", (7, 0), None),
        (False, "gcc", (9, 0), "Triton is not installed"),
        (True, "", (9, 0), "there is no C compiler (gcc, clang, cc)"),
        (True, "gcc", (6, 1), "the GPU's compute capability is 6.1, and compiling takes 7.0"),
    ],
)
def test_what_compiling_for_a_gpu_takes(
    monkeypatch: pytest.MonkeyPatch, triton: bool, compiler: str, capability: tuple[int, int], told: str | None
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compile_fault(CUDA) == told


def test_a_call_is_timed_by_the_gpu_s_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed over at once and carried out later: the host's clock would see nothing of it. The first calls, in which
    kernels are compiled and planned, do not count, and of the others the best."""
    device = Device()

    class WaitedFor(Event):
        def synchronize(self) -> None:
            device.carry_out()

    slow = iter([9.0, 5.0, 5.0, *[0.3] * 5, *[0.2] * 5, *[0.25] * 5])
    made: Any = lambda enable_timing: WaitedFor(device)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", made)
    assert seconds_per_call(lambda: device.compute(next(slow))) == pytest.approx(0.2)
    assert next(slow, None) is None
