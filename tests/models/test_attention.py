"""Attention kernels by name: those that run here agree with the formula, and a wrong one is found out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models import attention
from streamdiff.models.wan.transformer import KeyValue, attend
from tests.small import CPU, small_model

HERE = ("auto", "math", "flash")  # on every CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HERE)
def test_kernels_that_run_here_pass(name: str, dtype: torch.dtype) -> None:
    attention.probe(name, CPU, dtype, heads=3, head_dim=64)


def test_one_that_cannot_run_here_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"attention kernel cudnn cannot run here \(cpu, torch.float32.*use auto"):
        attention.probe("cudnn", CPU, torch.float32, heads=3, head_dim=64)


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sage'; it can be auto, math, flash, efficient, cudnn"):
        attention.probe("sage", CPU, torch.float32, heads=3, head_dim=64)


@pytest.mark.parametrize("fault", ["noise", "nan", "no softmax scale"])
def test_a_wrong_one_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.scaled_dot_product_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if fault == "no softmax scale":
            return right(query * query.shape[-1] ** 0.5, key, value)
        return torch.randn_like(query) if fault == "noise" else torch.full_like(query, torch.nan)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    with pytest.raises(ConfigError, match="attention kernel auto is wrong here"):
        attention.probe("auto", CPU, torch.float32, heads=3, head_dim=64)


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

    for name in HERE[1:]:
        torch.testing.assert_close(run(name), run("auto"), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
        run("cudnn")
