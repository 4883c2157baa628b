"""Autoencoder files in every layout, and files with something wrong in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from safetensors.torch import save_file
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.models.autoencoder.autoencoder import build
from streamdiff.models.autoencoder.wan import WAN_CLASS, Half, WanAutoencoder, to_diffusers
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
    made = build(path, read_tensors(path / FILE if path.is_dir() else path), own, half, None, device, dtype)
    assert isinstance(made, WanAutoencoder)
    return made.autoencoder


LAYOUTS: dict[str, Callable[[AutoencoderKLWan], dict[str, Any]]] = {
    "original.pth": original_layout,
    "wrapped.pth": lambda stored: {"state_dict": original_layout(stored), "step": 3},
    "original.safetensors": original_layout,
    "diffusers.safetensors": lambda stored: dict(stored.state_dict()),
    "beside a transformer.pth": original_layout,
}


def write(folder: Path, name: str, autoencoder: AutoencoderKLWan) -> Path:
    """A file in one of the layouts; "folder" is diffusers' own."""
    path = folder / name
    if name == "folder":
        autoencoder.save_pretrained(path)
    else:
        (torch.save if path.suffix == ".pth" else save_file)(LAYOUTS[name](autoencoder), path)
    if name.startswith("beside"):  # as the original repositories have it
        (folder / "config.json").write_text(json.dumps({"_class_name": "WanModel", "dim": 1536}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("layout", ["folder", *LAYOUTS])
def test_every_layout_gives_the_weights_of_one_half(tmp_path: Path, layout: str, half: Half) -> None:
    """Widths that differ between the halves: from the shapes."""
    stored = small_wan_autoencoder(5, base_dim=4, decoder_base_dim=6)
    loaded = load(write(tmp_path, layout, stored), half, CPU, torch.float32)
    wanted = stored.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.is_meta != name.startswith(HALVES[half]), name
        assert tensor.is_meta or torch.equal(tensor, wanted[name]), name
    for key in ("base_dim", "decoder_base_dim", "dim_mult", "temperal_downsample", "latents_mean", "latents_std"):
        assert loaded.config[key] == stored.config[key] or tuple(loaded.config[key]) == tuple(stored.config[key])


@pytest.mark.parametrize("name", ["original.pth", "original.safetensors"])
def test_a_file_that_is_cut_off_anywhere_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, small_wan_autoencoder())
    content = path.read_bytes()
    for length in (*range(0, 2000, 490), len(content) // 2, len(content) - 1):
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


@pytest.mark.parametrize(("name", "count"), [("wan2.1", 194), ("wan2.2", 196)])
def test_all_tensors_of_the_published_models_find_their_place(name: str, count: int) -> None:
    with torch.device("meta"):
        published = AutoencoderKLWan.from_config(catalogue.parts().autoencoders[name].config)
    original, wanted = original_layout(published), published.state_dict()
    names = to_diffusers(original)
    assert len(original) == len(names) == count
    assert set(names.values()) == set(wanted)
    assert all(original[name].shape == wanted[target].shape for name, target in names.items())


@pytest.mark.parametrize(
    "name",
    [
        "decoder.upsamples.0.upsamples.0.upsamples.0.residual.0.gamma",
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
