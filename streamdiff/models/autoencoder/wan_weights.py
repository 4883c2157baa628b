"""Maps a Wan autoencoder's tensor names to diffusers' `AutoencoderKLWan`, and infers its configuration.

Original names are those of `Wan2.1_VAE.pth`; shapes are the same. Only Wan2.1's layout: two residual blocks a level in
the encoder, three in the decoder. Wan2.2's is nested otherwise.

The layout is recognised from the names, and without a configuration the architecture from the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.normalisation import WAN_CHANNELS
from streamdiff.models.checkpoint.json_file import some

Half = Literal["decoder", "encoder", "both"]
CLASS = "AutoencoderKLWan"
PREFIXES: dict[Half, tuple[str, ...]] = {
    "decoder": ("decoder.", "post_quant_conv."),
    "encoder": ("encoder.", "quant_conv."),
    "both": ("",),
}
_BLOCKS = 2
"""Residual blocks of a level, in every layout that this reads without a configuration."""


def read(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """The tensors in diffusers' names, and the configuration: `config`, or what the shapes tell. `path` is for
    messages.

    Raises:
        ConfigError: original names that are none of the layout; or sizes that neither a configuration nor the shapes
            tell.
    """
    if is_original(tensors):
        tensors = {target: tensors[name] for name, target in to_diffusers(tensors).items()}
    return tensors, config or _config_of(path, tensors)


def _config_of(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration of diffusers' class, inferred from the shapes of tensors with diffusers' names."""

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


# ---- original names -------------------------------------------------------------------------------------------------

_LEAF = r"(?P<leaf>weight|bias)"
_HALF = r"(?P<half>encoder|decoder)"
_IN_BLOCK = {
    "residual.0.gamma": "norm1.gamma",
    "residual.2.weight": "conv1.weight",
    "residual.2.bias": "conv1.bias",
    "residual.3.gamma": "norm2.gamma",
    "residual.6.weight": "conv2.weight",
    "residual.6.bias": "conv2.bias",
    "shortcut.weight": "conv_shortcut.weight",
    "shortcut.bias": "conv_shortcut.bias",
}
_BLOCK = "(?P<block>" + "|".join(map(re.escape, _IN_BLOCK)) + ")"
_RESAMPLE = r"(?P<resample>(?:resample\.1|time_conv)\.(?:weight|bias))"
_ATTENTION = r"(?P<attention>norm\.gamma|(?:to_qkv|proj)\.(?:weight|bias))"
# Decoder: three residual blocks and what enlarges, counted through.
_LEVEL = 4

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), target)
    for pattern, target in (
        (rf"conv1\.{_LEAF}", "quant_conv.{leaf}"),
        (rf"conv2\.{_LEAF}", "post_quant_conv.{leaf}"),
        (rf"{_HALF}\.conv1\.{_LEAF}", "{half}.conv_in.{leaf}"),
        (rf"{_HALF}\.head\.0\.gamma", "{half}.norm_out.gamma"),
        (rf"{_HALF}\.head\.2\.{_LEAF}", "{half}.conv_out.{leaf}"),
        (rf"{_HALF}\.middle\.(?P<middle>[02])\.{_BLOCK}", "{half}.mid_block.resnets.{middle}.{block}"),
        (rf"{_HALF}\.middle\.1\.{_ATTENTION}", "{half}.mid_block.attentions.0.{attention}"),
        (rf"encoder\.downsamples\.(?P<index>\d+)\.{_BLOCK}", "encoder.down_blocks.{index}.{block}"),
        (rf"encoder\.downsamples\.(?P<index>\d+)\.{_RESAMPLE}", "encoder.down_blocks.{index}.{resample}"),
        (rf"decoder\.upsamples\.(?P<index>\d+)\.{_BLOCK}", "decoder.up_blocks.{level}.resnets.{place}.{block}"),
        (rf"decoder\.upsamples\.(?P<index>\d+)\.{_RESAMPLE}", "decoder.up_blocks.{level}.upsamplers.0.{resample}"),
    )
)
_ORIGINAL = re.compile(r"(?:encoder\.downsamples|decoder\.upsamples|(?:encoder|decoder)\.(?:middle|head))\..*")


def is_original(names: Iterable[str]) -> bool:
    """Whether any of the names is one of the original layout that diffusers does not have."""
    return any(_ORIGINAL.fullmatch(name) for name in names)


def to_diffusers(names: Iterable[str]) -> dict[str, str]:
    """diffusers' name of each original name, in the same order.

    Raises:
        ConfigError: lists names that are none of the layout.
    """
    found = {name: _renamed(name) for name in names}
    unknown = [name for name, target in found.items() if target is None]
    if unknown:
        raise ConfigError(
            f"{len(unknown)} of {len(found)} tensor names are not those of Wan2.1_VAE.pth: {some(unknown)}; a Wan2.2 "
            "autoencoder can be used as a diffusers folder"
        )
    return {name: target for name, target in found.items() if target is not None}


def _renamed(name: str) -> str | None:
    for pattern, target in _RULES:
        if match := pattern.fullmatch(name):
            return _filled(target, match.groupdict())
    return None


def _filled(target: str, parts: dict[str, str]) -> str | None:
    """The target's name; None where a block stands in the place of what enlarges, or the other way round."""
    if "block" in parts:
        parts["block"] = _IN_BLOCK[parts["block"]]
    if "middle" in parts:
        parts["middle"] = str(int(parts["middle"]) // 2)
    if "{level}" in target:
        level, place = divmod(int(parts["index"]), _LEVEL)
        if ("block" in parts) != (place < _LEVEL - 1):
            return None
        parts |= {"level": str(level), "place": str(place)}
    return target.format(**parts)
