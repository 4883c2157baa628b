"""Sizes of decoders, computed from their configuration: weights, a stream's memory, activations of a call, operations;
and the configuration of TAEHV. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_PLANE = 9
"""Size of a kernel of 3 x 3 pixels, the least that looks beyond a row."""
_LOOKED_BACK = 2
"""Input frames that a causal convolution of three frames keeps."""
_WAN_WORK, _TAEHV_WORK = 7.0, 2.5
"""Tensors of the size of the last layer's input that are alive at a call's widest moment: those of enlarging, in
float32. Measured without compilation (tests/models/autoencoder/test_memory_size.py)."""


@dataclass(frozen=True)
class DecoderSizes:
    """Numbers (not bytes) that a decoder takes: `weights`, `remembered` of each stream, `work_per_latent` beside it for
    each latent frame of a call; and floating-point operations of decoding one latent frame, of which `attention_flops`
    are those of attention within a frame. Where ranks share pictures by rows (`row_decoder`): `halos` convolutions look
    beyond a row, whose inputs have `halo` numbers in a row for each latent frame and `kept_halo` for what they look
    back on; `attended` numbers of each latent frame go to every rank."""

    weights: int = 0
    remembered: int = 0
    work_per_latent: int = 0
    flops: float = 0.0
    attention_flops: float = 0.0
    halos: int = 0
    halo: int = 0
    kept_halo: int = 0
    attended: int = 0

    def work(self, latents: int) -> int:
        """Peak values that a call for so many latent frames needs beyond the stream's memory: the new memory, which is
        held beside the old one, and activations."""
        return self.remembered + latents * self.work_per_latent


NO_DECODER = DecoderSizes()


def wan_decoder(config: Mapping[str, Any], height: int, width: int) -> DecoderSizes:
    """Sizes of Wan's decoder for latents of `height` x `width`; `config` as for `wan_values`."""
    layers = list(_wan_layers(config, height * width))
    temporal, spatial = 2 ** sum(config["temperal_downsample"]), 2 ** (len(config["dim_mult"]) - 1)
    base: int = config.get("decoder_base_dim") or config["base_dim"]
    middle = base * config["dim_mult"][-1]
    attention = 4.0 * (height * width) ** 2 * middle
    beyond = [(before, size, places, scale) for before, _, size, _, places, scale in layers if size >= _PLANE]
    return DecoderSizes(
        weights=sum((size * before + 1) * after + norm for before, after, size, norm, *_ in layers),
        remembered=wan_values(config, height, width),
        work_per_latent=round(_WAN_WORK * base * config["dim_mult"][0] * temporal * height * width * spatial**2),
        flops=attention + sum(2.0 * size * before * after * places for before, after, size, _, places, _ in layers),
        attention_flops=attention,
        halos=len(beyond),
        halo=sum(before * places // (height * scale) for before, _, places, scale in beyond),
        kept_halo=sum(_LOOKED_BACK * before * width * scale for before, size, _, scale in beyond if size > _PLANE),
        attended=middle * height * width,
    )


def _wan_layers(config: Mapping[str, Any], pixels: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Every convolution: channels before and after, size of its kernel, weights of the norm before it, pixels of all
    frames that it makes of one latent frame, and its rows to one of the latents'."""
    scale = 1
    base: int = config.get("decoder_base_dim") or config["base_dim"]
    multiples: list[int] = [*config["dim_mult"]][::-1]
    grows_in_time = [*config["temperal_downsample"]][::-1]
    widths = [base * each for each in (multiples[0], *multiples)]
    latent, middle, residual = config["z_dim"], widths[0], bool(config.get("is_residual"))
    yield latent, latent, 1, 0, pixels, scale
    yield latent, middle, 27, 0, pixels, scale
    yield from [(middle, middle, 27, middle, pixels, scale)] * 4
    yield middle, 3 * middle, 1, middle, pixels, scale  # attention
    yield middle, middle, 1, 0, pixels, scale
    for level, (before, after) in enumerate(pairwise(widths)):
        if level > 0 and not residual:
            before //= 2  # enlarging halves the channels
        yield before, after, 27, before, pixels, scale
        yield from [(after, after, 27, after, pixels, scale)] * (2 * config["num_res_blocks"] + 1)
        if before != after:
            yield before, after, 1, 0, pixels, scale
        if level < len(grows_in_time):
            if grows_in_time[level]:
                yield after, 2 * after, 3, 0, pixels, scale
                pixels *= 2
            pixels, scale = pixels * 4, scale * 2
            yield after, after if residual else after // 2, 9, 0, pixels, scale
    patch = config.get("patch_size") or 1
    yield widths[-1], 3 * patch**2, 27, widths[-1], pixels, scale


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


@dataclass(frozen=True)
class TaehvConfig:
    """Layer sizes of a TAEHV autoencoder. The defaults are those for Wan2.1 (taew2_1).

    Strides are (space, space, space) and (time, time, time) of the three decoder stages, the encoder mirrors them.
    `frames_to_trim`: leading decoded frames that a stream's first chunk does not show (Wan's 1 + 4n convention: 3).
    A file may have the decoder alone, without an encoder.
    """

    latent_channels: int = 16
    patch_size: int = 1
    decoder_widths: tuple[int, int, int, int] = (256, 128, 64, 64)
    decoder_blocks: tuple[int, int, int] = (3, 3, 3)
    decoder_space: tuple[int, int, int] = (2, 2, 2)
    decoder_time: tuple[int, int, int] = (1, 2, 2)
    encoder_widths: tuple[int, int, int, int] = (64, 64, 64, 64)
    encoder_blocks: tuple[int, int, int] = (3, 3, 3)
    frames_to_trim: int = 3
    has_encoder: bool = True

    @property
    def spatial(self) -> int:
        """Pixels per latent pixel, each way."""
        return self.patch_size * self.decoder_space[0] * self.decoder_space[1] * self.decoder_space[2]

    @property
    def temporal(self) -> int:
        """Frames per latent frame."""
        return self.decoder_time[0] * self.decoder_time[1] * self.decoder_time[2]

    def memory_values(self, height: int, width: int) -> int:
        """Numbers that a decoder's stream of `height` x `width` latent pixels keeps: the last input of each block."""
        count, pixels = 0, height * width
        for channels, number, stride in zip(self.decoder_widths, self.decoder_blocks, self.decoder_space, strict=False):
            count, pixels = count + number * channels * pixels, pixels * stride**2
        return count

    def decoder(self, height: int, width: int) -> DecoderSizes:
        """Sizes of the decoder, for latents of `height` x `width`."""
        frames, last = self.temporal, self.decoder_widths[3]
        pixels = height * width * (self.spatial // self.patch_size) ** 2
        return DecoderSizes(
            weights=self._decoder_weights(),
            remembered=self.memory_values(height, width),
            work_per_latent=round(_TAEHV_WORK * last * frames * pixels),
            flops=self.decode_flops(height, width),
            halos=2 + sum(3 * count + 1 for count in self.decoder_blocks),
            halo=self._halo(width),
        )

    def _halo(self, width: int) -> int:
        """See `DecoderSizes.halo`; what a block looks back on is part of its input."""
        inner, frames, count = self.decoder_widths, 1, self.latent_channels * width
        for i, (blocks, grows, lasts) in enumerate(
            zip(self.decoder_blocks, self.decoder_space, self.decoder_time, strict=True)
        ):
            count += 4 * blocks * inner[i] * width * frames  # of a block's three, the first sees the frame before too
            width, frames = width * grows, frames * lasts
            count += inner[i] * width * frames
        return count + inner[-1] * width * frames

    def _decoder_weights(self) -> int:
        inner = self.decoder_widths
        count = (9 * self.latent_channels + 1) * inner[0] + (9 * inner[3] + 1) * 3 * self.patch_size**2
        for i, (blocks, grows) in enumerate(zip(self.decoder_blocks, self.decoder_time, strict=True)):
            block = (9 * 2 * inner[i] + 1) * inner[i] + 2 * (9 * inner[i] + 1) * inner[i]
            count += blocks * block + grows * inner[i] ** 2 + 9 * inner[i] * inner[i + 1]
        return count

    def decode_flops(self, height: int, width: int) -> float:
        """Floating-point operations of decoding one latent frame of `height` x `width` latent pixels."""
        inner, pixels = self.decoder_widths, height * width
        frames, macs = 1, 9 * self.latent_channels * inner[0] * pixels
        for i, (count, grows, lasts) in enumerate(
            zip(self.decoder_blocks, self.decoder_space, self.decoder_time, strict=True)
        ):
            # A block is three 3x3 convolutions, the first of which sees the frame before too; then time grows by a 1x1.
            macs += (count * 36 + lasts) * inner[i] ** 2 * pixels * frames
            pixels, frames = pixels * grows**2, frames * lasts
            macs += 9 * inner[i] * inner[i + 1] * pixels * frames
        return 2.0 * (macs + 9 * inner[-1] * 3 * self.patch_size**2 * pixels * frames)
