"""Rotary positions: Wan's, for positions without end."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from streamdiff.models.transformer import rope


@pytest.mark.parametrize("head_dim", [12, 32, 128])
def test_the_table_is_diffusers_table(head_dim: int) -> None:
    frames, height, width = 7, 3, 5
    cos, sin = WanRotaryPosEmbed(head_dim, (1, 2, 2), 64)(torch.zeros(1, 4, frames, 2 * height, 2 * width))
    table = rope.table(torch.arange(frames), height, width, head_dim)
    torch.testing.assert_close(table.real, cos[0, ..., ::2], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.imag, sin[0, ..., 1::2], rtol=0, atol=1e-6)


def scores(position: int, distance: int) -> torch.Tensor:
    query, key = torch.randn(2, 6, 2, 32, generator=torch.Generator().manual_seed(9))
    near = rope.rotate(query, rope.table(torch.tensor([position + distance]), 2, 3, 32))
    far = rope.rotate(key, rope.table(torch.tensor([position]), 2, 3, 32))
    return torch.einsum("qhd,khd->hqk", near, far)


@pytest.mark.parametrize("distance", [0, 1, 14])
def test_only_distance_matters_at_position_three_million_too(distance: int) -> None:
    torch.testing.assert_close(scores(3_000_000, distance), scores(60, distance), rtol=0, atol=1e-4)


def test_rotating_keeps_length_and_type() -> None:
    x = torch.randn(2, 6, 3, 32, generator=torch.Generator().manual_seed(3))
    turned = rope.rotate(x, rope.table(torch.tensor([11]), 2, 3, 32))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert rope.rotate(x.half(), rope.table(torch.tensor([11]), 2, 3, 32)).dtype == torch.float16


@pytest.mark.parametrize("first", [0, 3_000_000])
def test_a_grid_that_is_computed_once_gives_the_table(first: int) -> None:
    frames = range(first, first + 3)
    grid = rope.Grid(2, 5, 32, torch.device("cpu"))
    assert torch.equal(grid.factors(frames), rope.table(torch.tensor(frames), 2, 5, 32))


@pytest.mark.parametrize("compiling", [False, True])
def test_real_factors_turn_as_complex_ones_do(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 6, 3, 32, generator=torch.Generator().manual_seed(5))
    factors = rope.table(torch.tensor([11]), 2, 3, 32)
    expected = rope.rotate(x, factors)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    got = rope.rotate(x, rope.matrices(factors))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 if compiling else 0)
    assert not torch.allclose(got, x, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """By matrices, which never make a float32 copy, as by the complex product of one."""
    x = torch.randn(2, 6, 3, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    factors = rope.table(torch.tensor([11]), 2, 3, 32)
    with torch.inference_mode():
        got, expected = rope.rotate(x, rope.matrices(factors)), rope.rotate(x.float(), factors)
    assert got.dtype == dtype and got.shape == x.shape
    assert (got == expected.to(dtype)).float().mean() > 0.99, "float32 sums may differ in their last digit"
    torch.testing.assert_close(got.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
