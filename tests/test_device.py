"""Which device and dtype a word means. `auto` is also used, on this machine's own device, by every other test."""

from __future__ import annotations

import pytest
import torch

from streamdiff.device import pick_device, pick_dtype
from streamdiff.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("there", "wanted", "picked"), [(False, "auto", CPU), (True, "auto", CUDA), (True, "cpu", CPU)]
)
def test_auto_takes_cuda_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, there: bool, wanted: str, picked: torch.device
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device(wanted) == picked


def test_a_device_that_is_not_there_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.device is cuda, but torch sees no CUDA device; use auto or cpu"):
        pick_device("cuda", "model.device")
    with pytest.raises(ConfigError, match="--device is gpu, but must be auto, cpu or cuda"):
        pick_device("gpu")


def test_dtypes() -> None:
    assert pick_dtype("auto", CPU) == pick_dtype("float32", CUDA) == torch.float32
    assert pick_dtype("auto", CUDA) == pick_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="--dtype is int8, but must be auto, float32 or bfloat16"):
        pick_dtype("int8", CPU)
