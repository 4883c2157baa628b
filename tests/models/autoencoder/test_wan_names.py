"""Original names to diffusers' names: against an inverse written apart, and against diffusers' own conversion."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.wan import to_diffusers
from tests.small_vae import original_layout


@pytest.fixture(scope="module")
def published() -> AutoencoderKLWan:
    with torch.device("meta"):
        return AutoencoderKLWan()


def test_all_194_tensors_of_the_published_model_find_their_place(published: AutoencoderKLWan) -> None:
    original, wanted = original_layout(published), published.state_dict()
    names = to_diffusers(original)
    assert len(original) == len(names) == 194
    assert set(names.values()) == set(wanted)
    assert all(original[name].shape == wanted[target].shape for name, target in names.items())


@pytest.mark.parametrize(
    ("original", "target"),
    [
        ("decoder.upsamples.4.shortcut.weight", "decoder.up_blocks.1.resnets.0.conv_shortcut.weight"),
        ("decoder.upsamples.11.resample.1.bias", "decoder.up_blocks.2.upsamplers.0.resample.1.bias"),
        ("decoder.upsamples.14.residual.6.bias", "decoder.up_blocks.3.resnets.2.conv2.bias"),
        ("encoder.downsamples.8.time_conv.weight", "encoder.down_blocks.8.time_conv.weight"),
        ("conv1.bias", "quant_conv.bias"),
    ],
)
def test_single_names(original: str, target: str) -> None:
    assert to_diffusers([original]) == {original: target}


@pytest.mark.parametrize(
    "name",
    [
        "decoder.upsamples.0.upsamples.0.residual.0.gamma",  # Wan2.2
        "decoder.upsamples.3.residual.0.gamma",  # a block where enlarging stands
        "decoder.upsamples.x.residual.0.gamma",
        "decoder.middle.3.residual.0.gamma",
        "xdecoder.conv1.weight",
        "decoder.conv1.weight.x",
        "model.conv1.weight",
        "quant_conv.weight",
    ],
)
def test_other_names_are_refused_and_listed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_diffusers(["conv1.weight", name])
    assert name in str(caught.value)
