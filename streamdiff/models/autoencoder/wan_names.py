"""Names of the tensors in `Wan2.1_VAE.pth`, and what diffusers' `AutoencoderKLWan` calls them. Shapes are the same.

Only Wan2.1's layout: two residual blocks a level in the encoder, three in the decoder. Wan2.2's is nested otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.json_file import some

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
