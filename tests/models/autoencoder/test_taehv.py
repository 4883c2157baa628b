"""The streaming autoencoder: any chunks give what the whole gives, and the published key layout."""

from __future__ import annotations

import pytest
import torch

from streamdiff.models.autoencoder.taehv import TAEHV, TaehvConfig, TaehvMemory, TGrow
from streamdiff.session_state import walk
from tests.small import AUTOENCODER, small_autoencoder

LATENTS = 6
TRIMMED = TaehvConfig(
    latent_channels=3,
    decoder_widths=(6, 6, 4, 4),
    decoder_blocks=(1, 2, 1),
    decoder_space=(2, 1, 2),
    decoder_time=(1, 2, 2),
    encoder_widths=(4, 4, 4, 4),
    encoder_blocks=(1, 1, 1),
)


def latents_of(config: TaehvConfig, batch: int) -> torch.Tensor:
    return torch.randn(batch, LATENTS, config.latent_channels, 3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("stride", "scale"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_growing_equals_enlarging_first(stride: int, scale: int) -> None:
    grow = TGrow(5, stride, scale)
    x = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(4))
    plain = grow.conv(torch.nn.functional.interpolate(x, scale_factor=scale))
    torch.testing.assert_close(grow(x), plain.unflatten(1, (stride, 5)).flatten(0, 1))


@pytest.mark.parametrize("grad", [False, True])
def test_pieces_equal_the_whole_with_and_without_gradients(grad: bool) -> None:
    model, latents = small_autoencoder(0), latents_of(AUTOENCODER, 1)
    memory = TaehvMemory()
    with torch.set_grad_enabled(grad):
        parts = [model.decode(piece, memory) for piece in latents.split(1, 1)]
        whole = model.decode(latents, TaehvMemory())
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)


def test_a_stream_is_causal_and_remembers() -> None:
    model, latents = small_autoencoder(0), latents_of(AUTOENCODER, 1)
    other = latents.clone()
    other[:, 3] += 1.0
    before, after = model.decode(latents, TaehvMemory()), model.decode(other, TaehvMemory())
    edge = 3 * AUTOENCODER.temporal
    assert torch.equal(before[:, :edge], after[:, :edge])
    assert not torch.equal(before[:, edge + AUTOENCODER.temporal :], after[:, edge + AUTOENCODER.temporal :])


@pytest.mark.parametrize("first", [1, 2])
def test_only_the_first_piece_of_a_stream_is_trimmed(first: int) -> None:
    model, latents, memory = small_autoencoder(0, TRIMMED), latents_of(TRIMMED, 1), TaehvMemory()
    assert TRIMMED.frames_to_trim == 3 and TRIMMED.temporal == 4
    assert model.decode(latents[:, :first], memory).shape[1] == 1 + 4 * (first - 1)
    assert model.decode(latents[:, first : first + 2], memory).shape[1] == 8


def test_memory_does_not_grow_and_is_not_tied_to_the_frames_it_came_from() -> None:
    model, latents, memory = small_autoencoder(0), latents_of(AUTOENCODER, 1), TaehvMemory()
    with torch.inference_mode():
        model.decode(latents, memory)
        size = walk.nbytes(memory)
        model.decode(latents[:, :1], memory)
        assert walk.nbytes(memory) == size
        assert all(past.untyped_storage().nbytes() == past.nbytes for past in memory.past.values())


def mem_block(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, inputs in ((0, 2 * width), (2, width), (4, width)):
        shapes[f"{prefix}.conv.{index}.weight"] = (width, inputs, 3, 3)
        shapes[f"{prefix}.conv.{index}.bias"] = (width,)
    return shapes


def published_layout() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in the published weights taew2_1."""
    shapes: dict[str, tuple[int, ...]] = {"encoder.0.weight": (64, 3, 3, 3), "encoder.0.bias": (64,)}
    for pool, stride in ((2, 2), (7, 2), (12, 1)):
        shapes[f"encoder.{pool}.conv.weight"] = (64, 64 * stride, 1, 1)
        shapes[f"encoder.{pool + 1}.weight"] = (64, 64, 3, 3)
        for block in range(pool + 2, pool + 5):
            shapes |= mem_block(f"encoder.{block}", 64)
    shapes |= {"encoder.17.weight": (16, 64, 3, 3), "encoder.17.bias": (16,)}
    shapes |= {"decoder.1.weight": (256, 16, 3, 3), "decoder.1.bias": (256,)}
    for first, width, stride, after in ((3, 256, 1, 128), (9, 128, 2, 64), (15, 64, 2, 64)):
        for block in range(first, first + 3):
            shapes |= mem_block(f"decoder.{block}", width)
        shapes[f"decoder.{first + 4}.conv.weight"] = (width * stride, width, 1, 1)
        shapes[f"decoder.{first + 5}.weight"] = (after, width, 3, 3)
    return shapes | {"decoder.22.weight": (3, 64, 3, 3), "decoder.22.bias": (3,)}


def test_the_default_layout_is_that_of_the_published_weights() -> None:
    with torch.device("meta"):
        model = TAEHV(TaehvConfig())
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == published_layout()
    assert (model.config.spatial, model.config.temporal) == (8, 4)
