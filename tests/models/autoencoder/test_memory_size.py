"""What a decoder remembers is counted from its shape, to the byte; the real thing is decoded beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from streamdiff.models.autoencoder.taehv import Config
from streamdiff.models.autoencoder.wan import WanDecoder
from streamdiff.models.catalogue import entries
from streamdiff.models.interfaces import StreamDecoder
from streamdiff.pipeline.planner.memory import stage_memory
from streamdiff.pipeline.planner.model_sizes import known_facts
from tests.small import AUTOENCODER, small_autoencoder, small_decoder
from tests.small_vae import small_wan_autoencoder

HEIGHT, WIDTH = 3, 2
WAN: dict[str, dict[str, object]] = {
    "wan 2.1": {},
    "three levels": {"base_dim": 8, "dim_mult": [1, 2, 4], "temperal_downsample": [True, False]},
    "a narrow decoder": {"num_res_blocks": 1, "decoder_base_dim": 6},
    "wan 2.2": {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 8},
}
TAEHV = {
    "small": AUTOENCODER,
    "published": replace(Config(), latent_channels=4, decoder_widths=(16, 8, 4, 4)),
}


def held(decoder: StreamDecoder, channels: int) -> int:
    """Bytes in the memory of a stream that runs."""
    memory = decoder.new_memory()
    for frames in (1, 1, 2):
        decoder.decode(torch.zeros(1, channels, frames, HEIGHT, WIDTH), memory)
    size: int = memory.nbytes
    return size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WAN)
def test_wan(kind: str, dtype: torch.dtype) -> None:
    decoder = WanDecoder(small_wan_autoencoder(**WAN[kind]).to(dtype))
    assert decoder.stream_bytes(HEIGHT, WIDTH) == held(decoder, 16)


@pytest.mark.parametrize("kind", TAEHV)
def test_taehv(kind: str) -> None:
    decoder = small_decoder(small_autoencoder(0, TAEHV[kind]), torch.zeros(4), torch.ones(4))
    assert decoder.stream_bytes(HEIGHT, WIDTH) == held(decoder, 4)


def test_the_published_one_is_counted_at_its_own_size() -> None:
    """3.78 GB in float32 at 480x832, half of it in bfloat16, on the stage that decodes."""
    entry = entries.find("self-forcing")
    assert 4 * known_facts(entry).decoder_memory_values == pytest.approx(3.777e9, rel=1e-3)
    first, *others = stage_memory(entry, 4)
    assert first.decoding == 2 * known_facts(entry).decoder_memory_values
    assert first.total == first.weights + first.caches + first.activations + first.decoding
    assert not any(stage.decoding for stage in others)
