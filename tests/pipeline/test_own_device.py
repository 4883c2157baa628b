"""Which CUDA device a rank and its threads work on, with stand-ins where there is none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from streamdiff.config import ModelConfig
from streamdiff.pipeline import build, load_plan, rank_process
from streamdiff.pipeline.topology import link_of

CUDA = torch.device("cuda")


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
