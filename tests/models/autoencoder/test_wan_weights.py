"""Autoencoder files in every layout, and files with something wrong in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from safetensors.torch import save_file
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.autoencoder import build
from streamdiff.models.autoencoder.wan import WAN_CLASS, Half
from streamdiff.models.checkpoint import read_tensors
from streamdiff.models.transformer.weights import FILE
from tests.small import CPU
from tests.small_vae import original_layout, small_wan_autoencoder

HALVES: dict[Half, tuple[str, str]] = {
    "decoder": ("decoder.", "post_quant_conv."),
    "encoder": ("encoder.", "quant_conv."),
}


def load(path: Path, half: Half, device: torch.device, dtype: torch.dtype) -> AutoencoderKLWan:
    """As it is loaded, but for a refusal before any tensor is read."""
    beside = (path if path.is_dir() else path.parent) / "config.json"
    config = json.loads(beside.read_text()) if beside.is_file() else {}
    own = config if config.get("_class_name") == WAN_CLASS else None
    made, _ = build(path, read_tensors(path / FILE if path.is_dir() else path), own, half, None, device, dtype)
    assert isinstance(made, AutoencoderKLWan)
    return made


def folder(path: Path, autoencoder: AutoencoderKLWan) -> Path:
    autoencoder.save_pretrained(path)
    return path


def original_pth(path: Path, autoencoder: AutoencoderKLWan) -> Path:
    torch.save(original_layout(autoencoder), path.with_suffix(".pth"))
    return path.with_suffix(".pth")


def old_pth(path: Path, autoencoder: AutoencoderKLWan) -> Path:
    torch.save(original_layout(autoencoder), path.with_suffix(".pth"), _use_new_zipfile_serialization=False)
    return path.with_suffix(".pth")


def wrapped_pth(path: Path, autoencoder: AutoencoderKLWan) -> Path:
    torch.save({"state_dict": original_layout(autoencoder), "step": 3}, path.with_suffix(".pth"))
    return path.with_suffix(".pth")


def original_safetensors(path: Path, autoencoder: AutoencoderKLWan) -> Path:
    save_file(original_layout(autoencoder), path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def diffusers_safetensors(path: Path, autoencoder: AutoencoderKLWan) -> Path:
    save_file(autoencoder.state_dict(), path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def original_beside_a_transformer(path: Path, autoencoder: AutoencoderKLWan) -> Path:
    """As the original repositories have it."""
    (path.parent / "config.json").write_text(json.dumps({"_class_name": "WanModel", "dim": 1536}))
    return original_pth(path, autoencoder)


LAYOUTS = [
    folder,
    original_pth,
    old_pth,
    wrapped_pth,
    original_safetensors,
    diffusers_safetensors,
    original_beside_a_transformer,
]


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("write", LAYOUTS)
def test_every_layout_gives_the_weights_of_one_half(
    tmp_path: Path, write: Callable[[Path, AutoencoderKLWan], Path], half: Half
) -> None:
    """Widths that differ between the halves, and a model that shrinks time elsewhere: all from the shapes."""
    stored = small_wan_autoencoder(5, base_dim=4, decoder_base_dim=6, dim_mult=[1, 2, 3, 3])
    loaded = load(write(tmp_path / "stored", stored), half, CPU, torch.float32)
    wanted = stored.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.is_meta != name.startswith(HALVES[half]), name
        assert tensor.is_meta or torch.equal(tensor, wanted[name]), name
    for key in ("base_dim", "decoder_base_dim", "dim_mult", "temperal_downsample", "latents_mean", "latents_std"):
        assert loaded.config[key] == stored.config[key] or tuple(loaded.config[key]) == tuple(stored.config[key])


@pytest.mark.parametrize("write", [original_pth, old_pth, original_safetensors])
def test_a_file_that_is_cut_off_anywhere_is_named(
    tmp_path: Path, write: Callable[[Path, AutoencoderKLWan], Path]
) -> None:
    path = write(tmp_path / "a", small_wan_autoencoder())
    content = path.read_bytes()
    for length in (*range(0, 2000, 97), len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError):
            load(path, "decoder", CPU, torch.float32)


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def instead(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        without("decoder.conv1.bias"),
        without("encoder.conv1.bias"),
        instead("decoder.upsamples.12.shortcut.bias", torch.zeros(4)),
        instead("decoder.conv1.bias", torch.zeros(3)),
        instead("decoder.head.2.bias", torch.tensor([0.0, float("nan"), 0.0])),
        instead("decoder.other", torch.zeros(1)),
        without("encoder.conv1.weight"),
        instead("conv2.weight", torch.zeros(4, 4, 1, 1, 1)),
    ],
)
def test_what_is_wrong_with_the_tensors_is_listed(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object]
) -> None:
    tensors = original_layout(small_wan_autoencoder())
    change(tensors)
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(ConfigError):
        load(tmp_path / "a.pth", "decoder", CPU, torch.float32)


def test_a_folder_whose_configuration_says_otherwise(tmp_path: Path) -> None:
    small_wan_autoencoder().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "base_dim": 8}))
    with pytest.raises(ConfigError):
        load(tmp_path, "decoder", CPU, torch.float32)
