"""Reads a Wan autoencoder: a diffusers folder, or one file with diffusers' or the original names (`Wan2.1_VAE.pth`).

The layout is recognised from the names, and for a file alone the architecture from the shapes. The module is built
without memory, and only the half that is wanted gets weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.normalisation import WAN_CHANNELS
from streamdiff.models.autoencoder.wan_names import is_original, to_diffusers
from streamdiff.models.checkpoint.checkpoint import check_finite, check_fit, read_tensors
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.transformer.weights import FILE

Half = Literal["decoder", "encoder"]
CLASS = "AutoencoderKLWan"
_PREFIXES: dict[Half, tuple[str, str]] = {
    "decoder": ("decoder.", "post_quant_conv."),
    "encoder": ("encoder.", "quant_conv."),
}
_BLOCKS = 2
"""Residual blocks of a level, in every layout that this reads without a configuration."""


def load(
    path: Path, half: Half, device: torch.device, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None = None
) -> AutoencoderKLWan:
    """The autoencoder at `path` with weights for one `half`; the other stays on the meta device.

    Args:
        path: a diffusers folder (`config.json` and `diffusion_pytorch_model.safetensors`), or a .safetensors or .pth
            file; a diffusers `config.json` beside a file counts.
        tensors: what `read_tensors` gave for the file, where it has been called before.

    Raises:
        ConfigError: nothing there; tensors missing, unexpected, misshapen or not finite, which are listed; or sizes
            that neither a configuration nor the shapes tell.
    """
    file = path / FILE if path.is_dir() else path
    found = dict(read_tensors(file) if tensors is None else tensors)
    if is_original(found):
        found = {target: found[name] for name, target in to_diffusers(found).items()}
    config = read_config(file.with_name("config.json")) or _config_of(file, found)
    with torch.device("meta"):
        autoencoder: AutoencoderKLWan = AutoencoderKLWan.from_config(config)
    check_fit(file, found, {name: tensor.shape for name, tensor in autoencoder.state_dict().items()})
    wanted = {name: tensor for name, tensor in found.items() if name.startswith(_PREFIXES[half])}
    check_finite(file, wanted)
    moved = {name: tensor.to(device, dtype) for name, tensor in wanted.items()}
    autoencoder.load_state_dict(moved, strict=False, assign=True)
    return autoencoder.eval().requires_grad_(False)


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration in `path` if it is one of a Wan autoencoder; None if there is none, or another model's (the
    original repositories keep the transformer's beside the autoencoder).

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    if not path.is_file():
        return None
    tree = read_object(path)
    return tree if tree.get("_class_name") == CLASS else None


def _config_of(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration that tensors with diffusers' names tell by their shapes."""

    def channels(name: str) -> int:
        if name not in tensors:
            raise ConfigError(
                f"{path} has no tensor {name}, so its size is unknown; expected the names of Wan2.1_VAE.pth or of a "
                "diffusers AutoencoderKLWan"
            )
        return tensors[name].shape[0]

    base = channels("encoder.conv_in.weight")
    latents = channels("post_quant_conv.weight")
    if latents != WAN_CHANNELS:
        raise ConfigError(
            f"{path} has {latents} latent channels, but only for {WAN_CHANNELS} are mean and standard deviation "
            "known; use a diffusers folder, whose config.json has latents_mean and latents_std"
        )
    step = _BLOCKS + 1
    firsts = [index for index in range(0, 100, step) if f"encoder.down_blocks.{index}.conv1.weight" in tensors]
    return {
        "base_dim": base,
        "decoder_base_dim": channels("decoder.norm_out.gamma"),
        "z_dim": latents,
        "dim_mult": [channels(f"encoder.down_blocks.{index}.conv1.weight") // base for index in firsts],
        "num_res_blocks": _BLOCKS,
        "temperal_downsample": [
            f"encoder.down_blocks.{index + step - 1}.time_conv.weight" in tensors for index in firsts[:-1]
        ],
    }
