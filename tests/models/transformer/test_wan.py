"""The transformer taken apart equals the one it was taken from."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformerBlock
from torch import Tensor

from streamdiff.models.transformer import rope
from streamdiff.models.transformer.wan import KeyValue, TokenStates, WanDenoiser, attend, position_planes
from streamdiff.models.transformer.weights import kept_dtype
from tests.small import LATENT_CHANNELS, small_transformer


class Whole:
    """Self-attention of a clip that stands alone, at positions 0, 1, 2, ..."""

    def __init__(self, frames: int, height: int, width: int) -> None:
        self.frames, self.height, self.width = frames, height, width

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        table = rope.table(torch.arange(self.frames), self.height, self.width, query.shape[-1])
        return attend(rope.rotate(query, table), rope.rotate(key, table), value)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("planes", [0, 6])
@pytest.mark.parametrize("per_frame", [False, True], ids=["one-timestep", "timestep-per-frame"])
@pytest.mark.parametrize("batch", [1, 2])
@torch.inference_mode()
def test_one_chunk_over_a_whole_clip_equals_diffusers(batch: int, per_frame: bool, planes: int) -> None:
    frames, height, width = 5, 4, 6
    transformer = small_transformer(3, layers=3, planes=planes)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, LATENT_CHANNELS, frames, height, width, generator=generator)
    text = torch.randn(batch, 16, 64, generator=generator)
    timestep = 1000 * torch.rand(batch, frames if per_frame else 1, generator=generator).expand(-1, frames)

    extra = position_planes(planes, height, width)[None, :, None].expand(batch, -1, frames, -1, -1)
    full = torch.cat([latents, extra], 1)
    tokens_per_frame = height // 2 * (width // 2)
    given = timestep.repeat_interleave(tokens_per_frame, 1) if per_frame else timestep[:, 0]
    expected = transformer(full, given, text, return_dict=False)[0]

    denoiser = WanDenoiser(transformer)
    tokens = denoiser.embed(latents, timestep)
    attention = Whole(frames, height // 2, width // 2)
    tokens = denoiser.run_blocks(tokens, denoiser.text(text), attention)
    got = denoiser.output_layer(tokens, (frames, height, width))

    assert expected.std() > 0.1, "the comparison would mean nothing for a model that predicts zero"
    assert got.shape == expected.shape == latents.shape
    assert relative_error(got, expected) <= 1e-5


@torch.inference_mode()
def test_blocks_in_two_runs_equal_blocks_in_one() -> None:
    denoiser = WanDenoiser(small_transformer(4, layers=3))
    generator = torch.Generator().manual_seed(2)
    tokens = denoiser.embed(
        torch.randn(1, LATENT_CHANNELS, 2, 4, 4, generator=generator), torch.tensor([[900.0, 300.0]])
    )
    text = denoiser.text(torch.randn(1, 16, 64, generator=generator))
    attention = Whole(2, 2, 2)
    whole = denoiser.run_blocks(tokens, text, attention)
    middle = denoiser.part(0, 1).run_blocks(tokens, text[:1], attention)
    parts = denoiser.part(1, 3).run_blocks(TokenStates(*middle), text[1:], attention)
    assert torch.equal(parts.hidden, whole.hidden)


@torch.inference_mode()
@pytest.mark.parametrize("folded", [False, True])
def test_controls_are_planes_beside_the_latents_that_add_nothing_until_they_are_trained(folded: bool) -> None:
    steered = WanDenoiser(small_transformer(4, planes=9), controls=3)
    layer = steered.model.patch_embedding
    plain = WanDenoiser(small_transformer(4, planes=6))
    plain.model.patch_embedding.load_state_dict({"weight": layer.weight[:, :-3], "bias": layer.bias})
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(3, LATENT_CHANNELS, 2, 4, 6, generator=generator)
    controls = torch.rand(3, 2, 3, generator=generator)

    def tokens(denoiser: WanDenoiser, rows: slice = slice(None), **more: Tensor) -> Tensor:
        return denoiser.patches(latents[rows], denoiser.fold_position_planes(4, 6) if folded else None, **more)

    assert torch.equal(tokens(steered), tokens(plain))
    planes = controls.transpose(1, 2)[..., None, None].expand(-1, -1, -1, 4, 6)
    positions = position_planes(6, 4, 6, frames=2).expand(3, -1, -1, -1, -1)
    expected = layer(torch.cat([latents, positions, planes], 1)).flatten(2).transpose(1, 2)
    found = tokens(steered, controls=controls)
    assert relative_error(found, expected) <= 1e-5 and relative_error(tokens(steered), expected) > 1e-2
    assert torch.equal(tokens(steered, slice(1, 2), controls=controls[1:2]), found[1:2]), "a row depends on no other"
    layer.weight[:, -3:] = 0
    assert torch.equal(tokens(steered, controls=controls), tokens(plain))


@torch.inference_mode()
def test_fused_query_key_value_and_modulation_equal_the_plain_ones_and_cost_no_memory() -> None:
    transformer = small_transformer(6, layers=3)
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(2, LATENT_CHANNELS, 3, 4, 6, generator=generator)
    text = torch.randn(2, 16, 64, generator=generator)
    timestep = torch.tensor([[900.0, 500.0, 100.0], [0.0, 10.0, 1000.0]])
    attention = Whole(3, 2, 3)

    def run(denoiser: WanDenoiser) -> torch.Tensor:
        texts = denoiser.text(text)
        return denoiser.run_blocks(denoiser.embed(latents, timestep), texts, attention).hidden

    plain, fused = WanDenoiser(transformer), WanDenoiser(transformer)
    expected = run(plain)
    before = {name: weight.clone() for name, weight in transformer.named_parameters()}
    fused.fuse()
    assert relative_error(run(fused), expected) <= 1e-6
    assert torch.equal(run(plain), expected), "the plain way is still there, on the same weights"
    assert all(torch.equal(weight, before[name]) for name, weight in transformer.named_parameters())
    storages = {weight.untyped_storage().data_ptr() for weight in transformer.parameters()}
    assert all(each.weight.untyped_storage().data_ptr() in storages for each in fused.fused)
    tokens = fused.embed(latents, timestep)
    texts = fused.text(text)
    middle = fused.part(0, 1).run_blocks(tokens, texts[:1], attention)
    parts = fused.part(1, 3).run_blocks(middle, texts[1:], attention)
    assert torch.equal(parts.hidden, fused.run_blocks(tokens, texts, attention).hidden)
    transformer.blocks[1].attn1.to_v.weight.mul_(1.5)  # one memory, so both see it
    assert relative_error(run(fused), run(plain)) <= 1e-6
    assert relative_error(run(fused), expected) > 1e-2


def as_written(
    block: WanTransformerBlock, hidden: torch.Tensor, modulation: torch.Tensor, text: KeyValue
) -> torch.Tensor:
    """A block of two heads over four latent frames of six tokens, as diffusers has it."""
    dtype, wide = hidden.dtype, modulation.dtype
    shift, scale, gate, ff_shift, ff_scale, ff_gate = (
        each.repeat_interleave(6, 1) for each in (block.scale_shift_table + modulation).unbind(2)
    )
    normal = (block.norm1(hidden.to(wide)) * (1 + scale) + shift).to(dtype)
    heads = lambda x: x.unflatten(-1, (2, 12))  # noqa: E731
    query, key = block.attn1.norm_q(block.attn1.to_q(normal)), block.attn1.norm_k(block.attn1.to_k(normal))
    mixed = attend(heads(query), heads(key), heads(block.attn1.to_v(normal))).flatten(2)
    expected = (hidden.to(wide) + block.attn1.to_out[0](mixed).to(wide) * gate).to(dtype)
    query = block.attn2.norm_q(block.attn2.to_q(block.norm2(expected.to(wide)).to(dtype)))
    expected = expected + block.attn2.to_out[0](attend(heads(query), text.key, text.value).flatten(2))
    normal = (block.norm3(expected.to(wide)) * (1 + ff_scale) + ff_shift).to(dtype)
    expected = (expected.to(wide) + block.ffn(normal).to(wide) * ff_gate).to(dtype)
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_block_in_few_kernels_is_the_block_as_it_is_written_in_diffusers(dtype: torch.dtype) -> None:
    """Norms, modulation and gates in float32 by steps, each rounded where diffusers rounds: in bfloat16 ours also
    rounds what a norm makes, and is as near to the numbers without any rounding."""
    transformer = small_transformer(7, layers=1)
    for name, weight in transformer.named_parameters():
        weight.data = weight.data.to(kept_dtype(name, dtype))
    denoiser = WanDenoiser(transformer).fuse()
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(2, 24, 24, generator=generator).to(dtype)
    modulation = torch.randn(2, 4, 6, 24, generator=generator)
    text = KeyValue(*torch.randn(2, 2, 5, 2, 12, generator=generator).to(dtype))
    before = hidden.clone()
    (own,) = denoiser._modulation_of_blocks(modulation)
    weights = denoiser.weights(0)
    mixed = attend(*denoiser.before_attention(weights, hidden, own))
    got = denoiser.after_attention(weights, hidden, own, text, mixed, attend)

    expected = as_written(denoiser.blocks[0], hidden, modulation, text)
    transformer.double()
    wide = KeyValue(text.key.double(), text.value.double())
    exact = as_written(denoiser.blocks[0], hidden.double(), modulation.double(), wide)

    assert torch.equal(hidden, before), "what is given is not written"
    assert got.dtype == dtype
    assert relative_error(got.double(), expected.double()) < (1e-6 if dtype is torch.float32 else 4e-3)
    assert relative_error(got.double(), exact) < 1.1 * relative_error(expected.double(), exact)


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
