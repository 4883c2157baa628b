"""The transformer taken apart equals the one it was taken from."""

from __future__ import annotations

import pytest
import torch

from streamdiff.models.transformer import rope
from streamdiff.models.transformer.wan import Tokens, WanDenoiser, attend, gelu, position_planes
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
    got = denoiser.head(tokens, (frames, height, width))

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
    middle = denoiser.part(0, 1).run_blocks(tokens, text, attention)
    parts = denoiser.part(1, 3).run_blocks(Tokens(*middle), text[1:], attention)
    assert torch.equal(parts.hidden, whole.hidden)


@torch.inference_mode()
def test_the_quick_gelu_is_gelu() -> None:
    x = torch.linspace(-30, 30, 4001)
    torch.testing.assert_close(gelu(x), torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-5, atol=2e-6)
    assert gelu(x.bfloat16()).dtype == torch.bfloat16


def test_position_planes_tell_every_place_apart() -> None:
    planes = position_planes(6, 5, 7)
    assert planes.shape == (6, 5, 7)
    places = planes.flatten(1).T
    assert torch.cdist(places, places).fill_diagonal_(9).min() > 0.05
    assert position_planes(0, 5, 7).shape == (0, 5, 7)
    torch.testing.assert_close(position_planes(3, 5, 7), planes[:3])


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
    middle = fused.part(0, 1).run_blocks(tokens, texts, attention)
    parts = fused.part(1, 3).run_blocks(middle, texts[1:], attention)
    assert torch.equal(parts.hidden, fused.run_blocks(tokens, texts, attention).hidden)
    transformer.blocks[1].attn1.to_v.weight.mul_(1.5)  # one memory, so both see it
    assert relative_error(run(fused), run(plain)) <= 1e-6
    assert relative_error(run(fused), expected) > 1e-2
