"""Which attention kernel is taken where that is left to a trial: real kernels of a CPU, with times that are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import _registry

from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer.attention_backend import AttentionShape, try_attention
from tests.small import CPU

SHAPE = AttentionShape(heads=2, head_dim=16, queries=100, keys=150)


def tried(candidates: Sequence[str], *milliseconds: float) -> tuple[str, str]:
    """A trial in which the candidates that are right take so long, one after the other."""
    times = iter(milliseconds)

    def stopwatch(call: Callable[[], object]) -> float:
        result = call()
        assert isinstance(result, Tensor) and result.shape == (1, 100, 2, 16)
        return next(times) / 1000

    trial = try_attention(SHAPE, CPU, torch.float32, candidates, stopwatch)
    assert next(times, None) is None, "each was timed"
    return trial


def test_the_fastest_is_taken_and_all_times_are_told() -> None:
    trial = tried(("sdpa", "flash", "math"), 2.0, 1.5, 4.0)
    assert trial[0] == "flash"
    assert trial[1] == ("tried at 100 of 150 tokens, 2 heads of 16, float32: sdpa 2 ms, flash 1.5 ms, math 4 ms")


def test_what_is_hardly_faster_does_not_change_the_kernel() -> None:
    """Or the same seed would give other frames at the next start."""
    assert tried(("sdpa", "flash"), 2.0, 1.96)[0] == "sdpa"
    assert tried(("sdpa", "flash"), 2.0, 1.93)[0] == "flash"


def test_one_that_cannot_run_is_left_out_and_told() -> None:
    trial = tried(("sdpa", "cudnn", "flash", "fa3"), 2.0, 3.0)
    assert trial[0] == "sdpa"
    assert "sdpa 2 ms, flash 3 ms; left out: cudnn cannot run here: Could not run 'aten::_sc" in trial[1]
    assert "; fa3 is not installed (no module flash_attn_interface; " in trial[1]


def test_one_that_is_wrong_at_the_model_s_size_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast: right in the small case that every kernel computes, and wrong in the last query of a long one."""
    right = F.scaled_dot_product_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = right(query, key, value)
        if query.shape[2] > 64:
            result[:, :, -1] = 0
        return result

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    attention_backend.probe("sdpa", CPU, torch.float32, heads=2, head_dim=16)
    trial = tried(("sdpa", "math"), 5.0)
    assert trial[0] == "math" and "left out: sdpa is wrong here: off by 0.1" in trial[1]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is done to torch's dispatch, with stand-ins for FA3 and FA4 in its register; FA4 cannot be had."""
    done: list[str] = []

    class Handle:
        def remove(self) -> None:
            done.append("FA3 removed")

    def activate() -> Handle:
        done.append("FA3 activated")
        return Handle()

    def broken() -> Handle:
        raise RuntimeError("FA4 requires compute capability 9.0 or 10.0")

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", activate)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", broken)
    monkeypatch.setattr(attention_backend, "missing", lambda name, device: None)
    yield done
    attention_backend.activate("")


def test_torch_s_own_flash_kernel_is_there_again_after_each(installed: list[str]) -> None:
    """FA3 takes the place of it for the whole process, while it is tried and timed only."""
    timed: list[str | None] = []

    def stopwatch(call: Callable[[], object]) -> float:
        call()
        timed.append(torch_attention.current_flash_attention_impl())
        return 1.0 if timed[-1] is None else 0.5

    trial = try_attention(SHAPE, CPU, torch.float32, ("sdpa", "fa3", "flash", "fa4"), stopwatch)
    assert timed == [None, "FA3", None], "sdpa, fa3, flash"
    assert trial[0] == "fa3" and "left out: fa4 cannot run here: FA4 requires compute" in trial[1]
    assert installed == ["FA3 activated", "FA3 removed"] * 2 and torch_attention.current_flash_attention_impl() is None


def test_an_implementation_that_is_taken_stays_for_the_process(installed: list[str]) -> None:
    attention_backend.activate("fa3")
    attention_backend.activate("fa3")
    assert installed == ["FA3 activated"]
    attention_backend.probe("flash", CPU, torch.float32, heads=2, head_dim=16)  # torch's own, for that long
    assert torch_attention.current_flash_attention_impl() == "FA3"
    assert installed == ["FA3 activated", "FA3 removed", "FA3 activated"]
