"""What a decoder remembers is counted from its shape, to the byte; the real thing is decoded beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from streamdiff.models import catalogue
from streamdiff.models.autoencoder.memory_size import wan_decoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, VideoAutoencoder
from streamdiff.models.autoencoder.taehv import TaehvConfig
from streamdiff.models.autoencoder.wan import WanAutoencoder
from streamdiff.pipeline.planner.memory import stage_memory
from streamdiff.pipeline.planner.model_sizes import entry_sizes
from streamdiff.session_state import walk
from tests.peak_memory import peak_bytes
from tests.small import AUTOENCODER, small_autoencoder, small_decoder
from tests.small_vae import small_wan_autoencoder

HEIGHT, WIDTH = 3, 2
WAN: dict[str, dict[str, object]] = {
    "wan 2.1": {},
    "three levels": {"base_dim": 8, "dim_mult": [1, 2, 4], "temperal_downsample": [True, False]},
    "a narrow decoder": {"num_res_blocks": 1, "decoder_base_dim": 6},
    "wan 2.2": {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 8},
}
TAEHV = {"small": AUTOENCODER, "published": replace(TaehvConfig(), latent_channels=4, decoder_widths=(16, 8, 4, 4))}


def held(decoder: VideoAutoencoder, channels: int) -> int:
    """Bytes in the memory of a stream that runs."""
    memory = decoder.new_memory()
    for frames in (1, 1, 2):
        PictureDecoder(decoder).decode(torch.zeros(1, channels, frames, HEIGHT, WIDTH), memory)
    size: int = walk.nbytes(memory)
    return size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WAN)
def test_wan(kind: str, dtype: torch.dtype) -> None:
    decoder = WanAutoencoder(small_wan_autoencoder(**WAN[kind]).to(dtype))
    assert decoder.stream_bytes(HEIGHT, WIDTH) == held(decoder, 16)


@pytest.mark.parametrize("kind", TAEHV)
def test_taehv(kind: str) -> None:
    decoder = small_decoder(small_autoencoder(0, TAEHV[kind]), torch.zeros(4), torch.ones(4))
    assert decoder.stream_bytes(HEIGHT, WIDTH) == held(decoder, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WAN)
def test_a_wan_decoders_weights_and_operations(kind: str) -> None:
    network = small_wan_autoencoder(**WAN[kind])
    decoder, counted = WanAutoencoder(network), wan_decoder(network.config, HEIGHT, WIDTH)
    half = (network.decoder, network.post_quant_conv)
    assert counted.weights == sum(each.numel() for part in half for each in part.parameters())
    assert counted.flops == pytest.approx(operations(decoder, 16), rel=1e-6)


@pytest.mark.parametrize("kind", TAEHV)
def test_a_small_decoders_weights(kind: str) -> None:
    network = small_autoencoder(0, TAEHV[kind])
    counted = TAEHV[kind].decoder(HEIGHT, WIDTH)
    assert counted.weights == sum(each.numel() for each in network.decoder.parameters())
    decoder = small_decoder(network, torch.zeros(4), torch.ones(4))
    assert counted.flops == operations(decoder, 4)


def operations(decoder: VideoAutoencoder, channels: int) -> int:
    """Of a running stream's next latent frame."""
    memory = decoder.new_memory()
    latents = torch.zeros(1, channels, 1, HEIGHT, WIDTH)
    for _ in range(3):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            decoder.decode_video(latents, memory)
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("latents", [1, 3])
@pytest.mark.parametrize("kind", ["wan 2.1", "wan 2.2", "taehv"])
def test_a_call_takes_the_memory_that_is_counted(kind: str, latents: int) -> None:
    """In bfloat16, at its widest moment, without compilation. Estimated, so as good as ten percent."""
    height, width = 8, 10
    if kind != "taehv":
        network = small_wan_autoencoder(**WAN[kind] | {"base_dim": 16, "decoder_base_dim": 16})
        counted = wan_decoder(network.config, height, width)
        decoder: VideoAutoencoder = WanAutoencoder(network.to(torch.bfloat16))
    else:
        counted = TaehvConfig(4).decoder(height, width)
        network = small_autoencoder(0, TaehvConfig(4)).to(torch.bfloat16)
        decoder = small_decoder(network, torch.zeros(4), torch.ones(4))
    decoder.set_channels_last(True)
    memory, piece = decoder.new_memory(), torch.zeros(1, decoder.latent_channels, latents, height, width)
    for _ in range(3):
        PictureDecoder(decoder).decode(piece[:, :, :1], memory)
    past = decoder.past(piece, memory)
    taken = peak_bytes(lambda: decoder.step(piece, past))
    assert 0.85 * 2 * counted.work(latents) < taken < 1.1 * 2 * counted.work(latents)


def test_the_published_one_is_counted_at_its_own_size() -> None:
    """3.78 GB in float32 at 480x832, half of it in bfloat16, on the stage that decodes."""
    entry = catalogue.find("self-forcing")
    assert 4 * entry_sizes(entry).decoder.remembered == pytest.approx(3.777e9, rel=1e-3)
    first, *others = stage_memory(entry, 4)
    assert first.decoder_state == 2 * entry_sizes(entry).decoder.remembered
    assert not any(stage.decoder_state or stage.decoder_call for stage in others)
