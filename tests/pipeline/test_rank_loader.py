"""What a rank loads by its configuration, and which CUDA device it and its threads work on, as far as that is decided
here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streamdiff.config import ModelConfig
from streamdiff.models.loader import Kernels
from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer.attention_backend import AttentionShape
from streamdiff.pipeline import build, load_plan, rank_process
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.load_plan import plan_load, plan_rank, try_kernels
from streamdiff.pipeline.planner import model_sizes
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches
from streamdiff.pipeline.rank_process import load_rank
from streamdiff.pipeline.topology import link_of
from tests.small import CPU

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that can be compiled for, as far as it is asked before it is used."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object() if name == "triton" else find(name))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_a_gpu_s_defaults_are_what_a_rank_runs(hopper: None) -> None:
    loader = plan_load(ModelConfig(), CUDA)
    assert loader.config.compile == "on"
    assert loader.preallocated == PreallocatedCaches(1, 4, "clean")
    assert loader.rank_facts()["model.compile"] == "on", "ranks that settle otherwise are not alike"
    plain = plan_load(ModelConfig(preset="plain"), CUDA)
    assert plain.preallocated is None
    assert plan_load(ModelConfig(preset="fast"), CUDA).steps == 2


@pytest.mark.parametrize(
    ("given", "keys"), [({"name": "self-forcing"}, 21 * 1560), ({"name": "longlive-1.3b"}, 12 * 1560)]
)
def test_attention_is_tried_at_the_model_s_sizes(
    hopper: None, monkeypatch: pytest.MonkeyPatch, given: Any, keys: int
) -> None:
    """What it takes is told, with the times."""
    asked: list[object] = []
    expected = AttentionShape(heads=12, head_dim=128, queries=4680, keys=keys)

    def trial(*given: object) -> tuple[str, str]:
        asked.append(given)
        return "cudnn", "cudnn 1 ms"

    monkeypatch.setattr(attention_backend, "try_attention", trial)
    config = ModelConfig.model_validate(given)
    sizes = model_sizes.sizes_of(config)
    kernels, told = try_kernels(config, sizes, CUDA, torch.bfloat16)
    assert asked == [(expected, CUDA, torch.bfloat16)]
    assert kernels == Kernels("cudnn", "none")
    assert str(told[0]) == "attention: cudnn (cudnn 1 ms)"
    assert try_kernels(ModelConfig(attention="flash"), sizes, CUDA, torch.bfloat16) == (Kernels("flash", "none"), ())


@torch.inference_mode()
def test_what_was_taken_is_what_the_transformer_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU's kernels, with times that are given; what was chosen is on standard error before weights are read."""
    monkeypatch.setattr(attention_backend, "CANDIDATES", ("sdpa", "flash"))
    times = iter((3.0, 1.0))
    trial = partial(
        attention_backend.try_attention,
        candidates=("sdpa", "flash"),
        stopwatch=lambda call: (call(), next(times))[1],
    )
    monkeypatch.setattr(attention_backend, "try_attention", trial)
    caplog.set_level("INFO")
    plan = plan_load(ModelConfig(), CPU)
    plan = replace(plan, config=plan.config.model_copy(update={"attention": "auto"}))
    loaded = load_rank(plan_rank(plan))
    assert loaded.model is not None and loaded.model.denoiser.attention == "flash"
    lines = caplog.messages
    assert lines[0].startswith("device cpu, dtype float32, steps 4, attention sdpa, compile off (")
    assert any(line.startswith("attention: flash (tried at ") for line in lines)


def test_a_head_that_decodes_gets_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk takes five forwards with `clean`, so a fifth of its decode, of about nine blocks, counts."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert plan_load(ModelConfig(stages=2), CPU).runs == ((0, 2), (2, 6))
    assert plan_load(ModelConfig(stages=2, decode_rank="last"), CPU).runs == ((0, 4), (4, 6))
    assert plan_load(ModelConfig(stages=2, decode_rank="dedicated"), CPU).runs == ((0, 3), (3, 6))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert plan_load(ModelConfig(stages=2), CPU).runs == ((0, 3), (3, 6)), "a core is left for decoding"


def test_all_ranks_have_the_blocks_that_the_head_has_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two, on a machine with more cores than that of rank 0."""
    store = dist.HashStore()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    plan_rank(plan_load(ModelConfig(stages=2), CPU), RankContext(0, 2, store))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    loaded = load_rank(plan_rank(plan_load(ModelConfig(stages=2), CPU), RankContext(1, 2, store)))
    assert loaded.model is not None and len(loaded.model.denoiser.blocks) == 4


class Devices:
    """Four CUDA devices; `bound` is what was made current, with the name of the thread."""

    def __init__(self) -> None:
        self.bound: list[tuple[str, torch.device]] = []

    def set_device(self, device: torch.device) -> None:
        self.bound.append((threading.current_thread().name, device))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """This process is rank 3 of 5."""
    found = Devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", found.set_device)
    for name, value in {"RANK": 3, "LOCAL_RANK": 3, "WORLD_SIZE": 5, "LOCAL_WORLD_SIZE": 5}.items():
        monkeypatch.setenv(name, str(value))
    return found


class FirstStep(Exception):
    """Raised by what a rank does first with its device, or with other ranks."""


def stop(*arguments: object) -> None:
    raise FirstStep


@pytest.mark.parametrize("begin", [rank_process.run_worker, build.build_pipeline])
def test_a_rank_binds_its_device_before_anything_else(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, begin: Any
) -> None:
    monkeypatch.setattr(load_plan, "plan_load", stop)
    with pytest.raises(FirstStep):
        begin(ModelConfig(stages=4, decode_rank="dedicated"))
    assert devices.bound == [("MainThread", torch.device("cuda", 3))]


@pytest.mark.parametrize(
    ("stages", "decode", "here", "picked"),
    [
        (4, "dedicated", 5, "nccl"),  # the fifth rank only decodes, and is at no edge
        (4, "head", 4, "nccl"),
        (5, "head", 5, "gloo"),
        (5, "dedicated", 6, "gloo"),
        (7, "dedicated", 4, "nccl"),  # two machines of four
        (9, "dedicated", 5, "gloo"),  # on the first of two machines two stages share a device
    ],
)
def test_nccl_between_as_many_stages_as_there_are_devices(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, stages: int, decode: Any, here: int, picked: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert link_of(ModelConfig(stages=stages, decode_rank=decode), CUDA) == picked
