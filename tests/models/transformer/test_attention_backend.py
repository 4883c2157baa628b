"""Attention kernels by name: those that run here agree with the formula, and a wrong one is found out."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep
from streamdiff.errors import ConfigError
from streamdiff.models.transformer import attention_backend
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
