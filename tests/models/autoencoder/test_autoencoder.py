"""Which autoencoder a path means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.autoencoder import load_autoencoder, native_fps
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.autoencoder.taehv import TaehvAutoencoder
from streamdiff.models.autoencoder.wan import WanAutoencoder
from tests.small import CPU
from tests.small_vae import original_layout, relative_error, small_wan_autoencoder
from training.embedded import WEIGHTS, load_model


@pytest.mark.slow
@pytest.mark.parametrize("path", ["tiny", WEIGHTS, WEIGHTS / "vae"], ids=["name", "model", "folder"])
def test_the_embedded_models_decoder_is_the_one_that_streams(path: str | Path) -> None:
    half, tiny = load_autoencoder(path, "decoder", CPU), load_model(WEIGHTS, CPU).decoder
    assert isinstance(half, TaehvAutoencoder)
    latents = torch.randn(1, 16, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    pictures, expected = (
        PictureDecoder(half).decode(latents, half.new_memory()),
        tiny.decode(latents, tiny.new_memory()),
    )
    assert pictures.shape == expected.shape == (2 * half.temporal, 256, 256, 3)
    assert torch.equal(pictures, expected)


@pytest.mark.slow
def test_a_diffusers_folder_and_a_pipelines_folder_and_an_original_file(tmp_path: Path) -> None:
    stored = small_wan_autoencoder()
    stored.save_pretrained(tmp_path / "pipeline" / "vae")
    torch.save(original_layout(stored), tmp_path / "Wan2.1_VAE.pth")
    latents = torch.randn(1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    direct = WanAutoencoder(stored).decode_video(latents, WanAutoencoder(stored).new_memory())
    for path in (tmp_path / "pipeline", tmp_path / "pipeline" / "vae", tmp_path / "Wan2.1_VAE.pth"):
        half = load_autoencoder(path, "decoder", CPU)
        assert isinstance(half, WanAutoencoder)
        assert relative_error(half.decode_video(latents, half.new_memory()), direct) == 0
        assert isinstance(load_autoencoder(path, "encoder", CPU), WanAutoencoder)
        assert native_fps(path) == 16
    assert native_fps("tiny") == 40


def test_what_is_no_autoencoder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_autoencoder(tmp_path / "nothing", "decoder", CPU)
    for config in (None, '{"_class_name": "AutoencoderKL"}', "{"):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(ConfigError):
            load_autoencoder(tmp_path, "decoder", CPU)
