"""What decoders remember of a stream, counted from their shape alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

_LOOKED_BACK = 2
"""Input frames that a causal convolution of three frames keeps."""


def wan_values(config: Mapping[str, Any], height: int, width: int) -> int:
    """Numbers that a running stream of `height` x `width` latent pixels has in the memory of Wan's decoder: two input
    frames of every causal convolution, at the size of the picture there.

    Args:
        config: of diffusers' `AutoencoderKLWan`: base_dim (or decoder_base_dim), z_dim, dim_mult, num_res_blocks,
            temperal_downsample, and is_residual for Wan2.2's kind.
    """
    base: int = config.get("decoder_base_dim") or config["base_dim"]
    multiples: list[int] = [*config["dim_mult"]][::-1]
    grows_in_time = [*config["temperal_downsample"]][::-1]
    widths = [base * each for each in (multiples[0], *multiples)]
    # The first convolution, and two blocks of two in the middle.
    pixels = height * width
    count: int = (config["z_dim"] + 4 * widths[0]) * pixels
    for level, (before, after) in enumerate(pairwise(widths)):
        if level > 0 and not config.get("is_residual"):
            before //= 2  # enlarging halves the channels
        # Blocks of two convolutions each; only the very first one takes what comes from below.
        count += (before + after + 2 * after * config["num_res_blocks"]) * pixels
        if level < len(grows_in_time):
            count += after * pixels if grows_in_time[level] else 0
            pixels *= 4
    return _LOOKED_BACK * (count + widths[-1] * pixels)


def taehv_values(widths: Sequence[int], blocks: Sequence[int], space: Sequence[int], height: int, width: int) -> int:
    """Numbers in the memory of a TAEHV's decoder (sizes as in `taehv.Config`): the last input of each block."""
    count, pixels = 0, height * width
    for channels, number, stride in zip(widths, blocks, space, strict=False):  # the last width is that of the output
        count, pixels = count + number * channels * pixels, pixels * stride**2
    return count
