"""The streaming autoencoder: any chunks give what the whole gives, and the published key layout."""

from __future__ import annotations

import pytest
import torch

from streamdiff.models.autoencoder.taehv import TAEHV, TaehvConfig, TaehvMemory
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


@pytest.mark.parametrize("grad", [False, True])
def test_pieces_equal_the_whole_with_and_without_gradients(grad: bool) -> None:
    model, latents = small_autoencoder(0), latents_of(AUTOENCODER, 1)
    memory = TaehvMemory()
    with torch.set_grad_enabled(grad):
        parts = [model.decode(piece, memory) for piece in latents.split(1, 1)]
        whole = model.decode(latents, TaehvMemory())
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)


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


def test_the_default_sizes_are_those_of_the_published_weights() -> None:
    """Names and order are in `test_taehv_codec`."""
    with torch.device("meta"):
        model = TAEHV(TaehvConfig())
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == 11_315_539
    assert (model.config.spatial, model.config.temporal) == (8, 4)
