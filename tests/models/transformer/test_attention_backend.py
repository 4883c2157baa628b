"""Attention kernels by name: those that run here agree with the formula, and a wrong one is found out. Which one is
taken where that is left to a trial."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import _registry

from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep
from streamdiff.errors import ConfigError
from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer.attention_backend import (
    AttendPaged,
    AttentionShape,
    attention_over_segments,
    paged,
    row_by_row,
    try_attention,
    try_paged,
)
from streamdiff.models.transformer.wan import KeyValue, SelfAttention, attend
from streamdiff.pipeline.kv_cache.attention import RollingAttention
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.small import CPU, small_model

HERE = ("auto", "sdpa", "flash")  # on every CPU


@pytest.mark.parametrize("fault", ["noise", "nan", "no softmax scale"])
def test_a_wrong_one_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.scaled_dot_product_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if fault == "no softmax scale":
            return right(query * query.shape[-1] ** 0.5, key, value)
        return torch.randn_like(query) if fault == "noise" else torch.full_like(query, torch.nan)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    with pytest.raises(ConfigError):
        attention_backend.probe("auto", CPU, torch.float32, heads=3, head_dim=64)


@torch.inference_mode()
def test_the_chosen_kernel_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward of the transformer: one that cannot run here raises there."""
    model = small_model(1)
    denoiser = model.denoiser
    latents = torch.zeros(1, *model.spec.chunk_shape)
    tokens = denoiser.embed(latents, torch.zeros(1, model.spec.chunk_latents))
    text = denoiser.text(model.text.encode("a red circle")[None])
    self_attention = lambda layer, query, key, value: attend(query, key, value)  # noqa: E731

    def run(name: str) -> Tensor:
        monkeypatch.setattr(denoiser, "attention", name)
        return denoiser.run_blocks(tokens, [KeyValue(*layer) for layer in text], self_attention).hidden

    for name in ("math", "flash"):
        torch.testing.assert_close(run(name), run("auto"), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError):
        run("cudnn")


@torch.inference_mode()
@pytest.mark.parametrize("name", HERE)
def test_a_choice_in_force_changes_no_flag_that_another_thread_meets(name: str) -> None:
    """Asked in the midst of a stage's forward, as the decoding thread may."""
    model = small_model(1)
    model.denoiser.attention = name
    stage = ModelRunner(model, CPU)
    stage.open(0, steps=4, kv_context="clean")
    stage.set_text(0, 0, model.text.encode("a red circle"), 0)
    before, met = flags(), []

    def ask(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            met.append(other.submit(flags).result())
        return own[-1](layer, query, key, value)

    own: list[SelfAttention] = []
    stage.attention.on = lambda rows: (own.append(RollingAttention.on(stage.attention, rows)), ask)[1]  # type: ignore
    given = torch.zeros(1, *model.spec.chunk_shape), torch.zeros(1, model.spec.chunk_latents, model.denoiser.width)
    stage.forward([MicroStep(0, 0, 0, 4, 0)], given)
    assert met == [before] * len(model.denoiser.blocks)


def flags() -> list[bool]:
    """Kernels that torch may choose here."""
    backends: Any = torch.backends.cuda
    return [getattr(backends, f"{kind}_sdp_enabled")() for kind in ("math", "flash", "mem_efficient", "cudnn")]


def test_the_configuration_knows_the_same_names() -> None:
    assert get_args(ModelConfig.model_fields["attention"].annotation) == attention_backend.NAMES


@pytest.mark.parametrize("name", ["sage", *attention_backend.IMPLEMENTATIONS])
def test_one_that_is_not_installed_is_refused_with_what_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    message = rf"{name} is not installed \(no module .*\) \(cpu, bfloat16.*\); right here are: auto, sdpa, flash$"
    with pytest.raises(ConfigError, match=message):
        attention_backend.probe(name, CPU, torch.bfloat16, heads=2, head_dim=64)
    assert "is not installed" in str(attention_backend.missing(name, torch.device("cuda")))


@torch.inference_mode()
@pytest.mark.parametrize("right", [True, False])
def test_sage_attention_is_called_and_compared(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in its place that is given the axes it is said, with its tolerance, and one that is wrong."""

    def sageattn(query: Tensor, key: Tensor, value: Tensor, tensor_layout: str) -> Tensor:
        assert tensor_layout == "NHD"
        return attend(query, key, value) * 1.05 if right else torch.randn_like(query)

    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=sageattn))
    monkeypatch.setattr(attention_backend, "missing", lambda name, device: None)
    with nullcontext() if right else pytest.raises(ConfigError):
        attention_backend.probe("sage", CPU, torch.float32, heads=3, head_dim=64)


def test_the_survey_says_of_each_why_not() -> None:
    found = attention_backend.survey(CPU, torch.float32, heads=3, head_dim=64)
    assert tuple(found) == attention_backend.NAMES
    assert [name for name in HERE if found[name] is not None] == []
    assert "cannot run here" in str(found["cudnn"])
    assert found["sage"]


@pytest.mark.parametrize("name", ["auto", "math", "flash"])
@pytest.mark.parametrize("cuts", [(), (3,), (3, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_keys_in_pieces_are_attended_to_as_one(name: str, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, n, 3, 12, generator=generator).to(dtype) for n in (5, 17, 17))
    parts = list(zip(key.tensor_split(cuts, 1), value.tensor_split(cuts, 1), strict=True))
    got = attention_backend.attention_over_segments(name)(3 * query, parts)
    expected = attention_backend._formula(3 * query, key, value)
    assert got.dtype == dtype and got.shape == query.shape
    assert float((got.double() - expected).norm() / expected.norm()) < (1e-6 if dtype is torch.float32 else 5e-3)


def test_one_that_weighs_its_pieces_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right by itself, and wrong where a sink lies apart from the window."""
    right = attention_backend._with_weights

    def unweighed(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        mixed, weights = right(name, query, key, value)
        return mixed, torch.zeros_like(weights)

    monkeypatch.setattr(attention_backend, "_with_weights", unweighed)
    with pytest.raises(ConfigError):
        attention_backend.probe("flash", CPU, torch.float32, heads=3, head_dim=64)


SHAPE, FRAME = AttentionShape(2, 8, queries=12, keys=72), 12
ATTEND = attention_over_segments("math")


def plain_varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: None, max_q: int, max_k: int, **more: Tensor
) -> Tensor:
    """What `varlen_attn` does with pages, by its documentation."""
    table, used, mixed = more["block_table"], more["seqused_k"], []
    assert table.dtype == ends.dtype == used.dtype == torch.int32 and more["num_splits"] == 1
    for row, (begin, end) in enumerate(pairwise(ends)):
        assert end - begin <= max_q and used[row] <= max_k
        keys, values = (each[table[row].long()].flatten(0, 1)[: used[row]][None] for each in (key, value))
        mixed.append(ATTEND(query[begin:end][None], [(keys, values)])[0])
    return torch.cat(mixed)


@pytest.mark.parametrize("page", [FRAME, 4, 1])
def test_pages_of_a_frame_and_parts_of_it_are_what_each_row_sees(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = plain_varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    query, key, value = (torch.randn(rows, FRAME, 2, 8) for rows in (3, 20, 20))
    seen = torch.randperm(18).view(3, 6)
    got = paged(page, query, key, value, seen)
    assert torch.allclose(got, row_by_row(ATTEND, query, key, value, seen), atol=1e-6)


def tried(kernel: Callable[..., Tensor], seconds: dict[str, float]) -> tuple[AttendPaged | None, str]:
    """The trial as on CUDA, with times by the name of what is called."""

    def stopwatch(call: partial[Tensor]) -> float:
        call()
        return seconds["alone" if call.func is row_by_row else f"pages of {call.args[0]}"]

    return try_paged(SHAPE, 3, FRAME, ATTEND, CPU, torch.float32, kernel, stopwatch)  # type: ignore[arg-type]


def right(page: int, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    return row_by_row(ATTEND, query, key, value, seen)


def wrong(page: int, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Every row sees what the first one does."""
    return row_by_row(ATTEND, query, key, value, seen[:1].expand_as(seen))


def refusing(page: int, *_: Tensor) -> Tensor:
    raise RuntimeError(f"page size {page} is no multiple of 256")


def test_a_right_kernel_that_is_faster_is_taken() -> None:
    found = tried(right, {"alone": 1.0, "pages of 12": 0.5})
    assert found[0] is not None and "by varlen_attn; tried with 3 rows" in found[1]
    assert tried(right, {"alone": 1.0, "pages of 12": 0.98})[0] is None, "that is noise"


@pytest.mark.parametrize(("kernel", "told"), [(wrong, "is wrong here: off by"), (refusing, "no multiple of 256")])
def test_one_that_is_wrong_or_cannot_run_is_not(kernel: Callable[..., Tensor], told: str) -> None:
    found = tried(kernel, {"alone": 1.0, "pages of 12": 0.1})
    assert found[0] is None and told in found[1] and found[1].startswith("row by row; ")


def test_large_frames_are_also_tried_in_parts() -> None:
    assert attention_backend._pages(1560) == (1560, 195)
    assert attention_backend._pages(64) == (64,)


def test_a_cpu_tries_nothing() -> None:
    found = try_paged(SHAPE, 3, FRAME, ATTEND, CPU, torch.float32)
    assert found == (None, "row by row: varlen_attn is for CUDA, and the device is cpu")


def test_a_trial_that_the_device_has_no_memory_for_leaves_it_at_row_by_row() -> None:

    def short(call: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = try_paged(SHAPE, 3, FRAME, ATTEND, CPU, torch.float32, refusing, short)
    assert found[0] is None and found[1].startswith("row by row: the trial cannot run here")


SHAPE = AttentionShape(heads=2, head_dim=16, queries=100, keys=150)


def tried_in_turn(candidates: Sequence[str], *milliseconds: float) -> tuple[str, str]:
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
    trial = tried_in_turn(("sdpa", "flash", "math"), 2.0, 1.5, 4.0)
    assert trial[0] == "flash"
    assert trial[1] == ("tried at 100 of 150 tokens, 2 heads of 16, float32: sdpa 2 ms, flash 1.5 ms, math 4 ms")


def test_what_is_hardly_faster_does_not_change_the_kernel() -> None:
    """Or the same seed would give other frames at the next start."""
    assert tried_in_turn(("sdpa", "flash"), 2.0, 1.96)[0] == "sdpa"
    assert tried_in_turn(("sdpa", "flash"), 2.0, 1.93)[0] == "flash"


def test_one_that_cannot_run_is_left_out_and_told() -> None:
    trial = tried_in_turn(("sdpa", "cudnn", "flash", "fa3"), 2.0, 3.0)
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
    trial = tried_in_turn(("sdpa", "math"), 5.0)
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
