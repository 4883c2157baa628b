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
from streamdiff.models.autoencoder.wan_weights import CLASS, Half
from streamdiff.models.checkpoint.checkpoint import read_tensors
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
    own = config if config.get("_class_name") == CLASS else None
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
        with pytest.raises(ConfigError, match=rf"{path.name}: (not a|holds more)"):
            load(path, "decoder", CPU, torch.float32)


def test_another_dtype(tmp_path: Path) -> None:
    loaded = load(original_pth(tmp_path / "a", small_wan_autoencoder()), "decoder", CPU, torch.bfloat16)
    assert loaded.decoder.conv_in.weight.dtype == torch.bfloat16


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def instead(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("decoder.conv1.bias"), r"of 194 tensors expected, 193 found: 1 missing \(decoder\.conv_in\.bias\)"),
        (without("encoder.conv1.bias"), r"1 missing \(encoder\.conv_in\.bias\)"),
        (
            instead("decoder.upsamples.12.shortcut.bias", torch.zeros(4)),
            r"1 unexpected \(decoder\.up_blocks\.3\.resnets\.0\.conv_shortcut\.bias\)",
        ),
        (
            instead("decoder.conv1.bias", torch.zeros(3)),
            r"1 of another shape \(decoder\.conv_in\.bias \[3\] instead of \[16\]\)",
        ),
        (instead("decoder.head.2.bias", torch.tensor([0.0, float("nan"), 0.0])), r"1 tensors hold NaN.*conv_out\.bias"),
        (instead("decoder.other", torch.zeros(1)), r"1 of 195 tensor names are not those of .*: decoder\.other"),
        (without("encoder.conv1.weight"), r"has no tensor encoder\.conv_in\.weight, so its size is unknown"),
        (instead("conv2.weight", torch.zeros(4, 4, 1, 1, 1)), r"has 4 latent channels, but only for 16"),
    ],
)
def test_what_is_wrong_with_the_tensors_is_listed(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    tensors = original_layout(small_wan_autoencoder())
    change(tensors)
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "a.pth", "decoder", CPU, torch.float32)


def test_a_folder_whose_configuration_says_otherwise(tmp_path: Path) -> None:
    small_wan_autoencoder().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "base_dim": 8}))
    with pytest.raises(ConfigError, match=r"of 194 tensors expected, 194 found: \d+ of another shape .*, \.\.\."):
        load(tmp_path, "decoder", CPU, torch.float32)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code from a file",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.pth", None, r"none\.pth: no such file"),
        ("a.gguf", b"x", r"a\.gguf: a checkpoint ends in \.safetensors, "),
        ("a.pth", b"", r"a\.pth: not a torch file"),
        ("a.pth", b"no tensors", r"a\.pth: not a torch file"),
        ("a.pth", b"\x80\x02 and nothing", r"a\.pth: "),
        ("a.safetensors", b"no tensors", r"a\.safetensors: not a readable safetensors file"),
        ("a.pth", {"decoder": Evil()}, r"holds more than tensors"),
        ("a.pth", {"args": 3, "x": torch.zeros(1)}, r"has no tensor encoder\.conv_in\.weight"),
        ("a.pth", [torch.zeros(1)], r"holds a list instead of tensors by name"),
        ("a.pth", {}, r"no tensors by name"),
    ],
)
def test_files_that_are_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: object, message: str
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, "decoder", CPU, torch.float32)
    assert capsys.readouterr().out == "", "no code from a file is run"
