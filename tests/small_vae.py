"""A very small random Wan autoencoder, and the original layout of one by a mapping of its own."""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor


def small_wan_autoencoder(seed: int = 0, **config: object) -> AutoencoderKLWan:
    """Random weights in which every tensor matters to the result: no norm is one, no bias zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = {"base_dim": 4, "z_dim": 16, **config}
        autoencoder: AutoencoderKLWan = AutoencoderKLWan.from_config(settings)
        with torch.no_grad():
            for weight in autoencoder.parameters():
                if weight.ndim < 5:
                    weight.add_(torch.randn_like(weight), alpha=0.1)
    return autoencoder.eval().requires_grad_(False)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest expected value."""
    assert value.shape == expected.shape, (value.shape, expected.shape)
    return ((value - expected).abs().max() / expected.abs().max()).item()


def original_name(name: str, nested: bool = False) -> str:
    """The name in `Wan2.1_VAE.pth`, or in Wan2.2's, which is `nested`, of a tensor that diffusers calls `name`."""
    words = name.split(".")
    if words[0] in ("quant_conv", "post_quant_conv"):
        return ".".join(["conv1" if words[0] == "quant_conv" else "conv2", *words[1:]])
    half, part, rest = words[0], words[1], words[2:]
    if part == "conv_in":
        return ".".join([half, "conv1", *rest])
    if part == "norm_out":
        return f"{half}.head.0.gamma"
    if part == "conv_out":
        return ".".join([half, "head", "2", *rest])
    if part == "mid_block":
        kind, number = rest[0], int(rest[1])
        if kind == "attentions":
            return ".".join([half, "middle", "1", *rest[2:]])
        return ".".join([half, "middle", str(2 * number), *original_block(rest[2:])])
    if nested:
        way, last = part.split("_")[0] + "samples", "3" if half == "decoder" else "2"
        place, inner = (rest[2], rest[3:]) if rest[1] == "resnets" else (last, rest[2:])
        return ".".join([half, way, rest[0], way, place, *original_block(inner)])
    if part == "down_blocks":
        return ".".join([half, "downsamples", rest[0], *original_block(rest[1:])])
    assert part == "up_blocks"
    place = 3 if rest[1] == "upsamplers" else int(rest[2])
    return ".".join([half, "upsamples", str(4 * int(rest[0]) + place), *original_block(rest[3:])])


def original_block(words: list[str]) -> list[str]:
    """What follows the number of a block; what enlarges and shrinks is called the same in both."""
    numbers = {"norm1": ["residual", "0"], "conv1": ["residual", "2"], "norm2": ["residual", "3"]}
    numbers |= {"conv2": ["residual", "6"], "conv_shortcut": ["shortcut"]}
    return [*numbers.get(words[0], [words[0]]), *words[1:]]


def original_layout(autoencoder: AutoencoderKLWan) -> dict[str, Tensor]:
    """The tensors of `Wan2.1_VAE.pth`, or Wan2.2's, had it these weights."""
    nested = autoencoder.config["is_residual"]
    return {original_name(name, nested): tensor for name, tensor in autoencoder.state_dict().items()}
