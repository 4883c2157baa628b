"""Sizes of decoders, computed from their configuration: weights, a stream's memory, activations of a call, operations;
and the configuration of TAEHV. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from streamdiff.models.weight_files import Count

_CAUSAL = (3, 27)
"""Sizes of kernels that see three frames."""
_LOOKED_BACK = 2
"""Input frames that such a convolution keeps."""
_WAN_WORK, _RESIDUAL_WORK, _TAEHV_WORK = 7.0, 11.7, 2.5
"""Tensors of the size of the last layer's input that are alive at a call's widest moment: those of enlarging, in
float32, in Wan2.2's with what goes around the block. Measured without compilation
(tests/models/autoencoder/test_memory_size.py)."""


@dataclass(frozen=True)
class DecoderSizes:
    """Numbers (not bytes) that a decoder takes: `weights`, `remembered` of each stream, `work_per_latent` beside it for
    each latent frame of a call; and floating-point operations of decoding one latent frame."""

    weights: int = 0
    remembered: int = 0
    work_per_latent: int = 0
    flops: float = 0.0

    def work(self, latents: int) -> int:
        """Peak values that a call for so many latent frames needs beyond the stream's memory: the new memory, which is
        held beside the old one, and activations."""
        return self.remembered + latents * self.work_per_latent


NO_DECODER = DecoderSizes()
_Blocks = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
_Strides = tuple[Count, Count, Count]


class _Convolution(NamedTuple):
    """One of a decoder's layers: channels before and after, pixels of its kernel, `frames` that it makes of one latent
    frame, `scale` of its rows and columns to the latents', weights of the norm before it, whether it has a bias;
    `past`: channels before that are of the frame before."""

    before: int
    after: int
    size: int
    frames: int
    scale: int
    norm: int = 0
    bias: bool = True
    past: int = 0

    @property
    def remembered(self) -> int:
        """Channels of input that a stream keeps."""
        return self.past or (_LOOKED_BACK * self.before if self.size in _CAUSAL else 0)


def _sizes_of(layers: Iterable[_Convolution], work: float, height: int, width: int) -> DecoderSizes:
    """What follows from the layers alone, for latents of `height` x `width`, with the `work` of such a decoder."""
    layers, pixels = list(layers), height * width
    last = layers[-1]
    return DecoderSizes(
        weights=sum((each.size * each.before + each.bias) * each.after + each.norm for each in layers),
        remembered=pixels * sum(each.remembered * each.scale**2 for each in layers),
        work_per_latent=round(work * last.before * last.frames * pixels * last.scale**2),
        flops=2.0 * pixels * sum(each.size * each.before * each.after * each.frames * each.scale**2 for each in layers),
    )


def wan_decoder(config: Mapping[str, Any], height: int, width: int) -> DecoderSizes:
    """Sizes of Wan's decoder for latents of `height` x `width`.

    Args:
        config: of diffusers' `AutoencoderKLWan`: base_dim (or decoder_base_dim), z_dim, dim_mult, num_res_blocks,
            temperal_downsample, and is_residual for Wan2.2's kind.
    """
    work = _RESIDUAL_WORK if config.get("is_residual") else _WAN_WORK
    found = _sizes_of(_wan_layers(config), work, height, width)
    middle: int = (config.get("decoder_base_dim") or config["base_dim"]) * config["dim_mult"][-1]
    attention = 4.0 * (height * width) ** 2 * middle
    return replace(found, flops=found.flops + attention)


def _wan_layers(config: Mapping[str, Any]) -> Iterator[_Convolution]:
    base: int = config.get("decoder_base_dim") or config["base_dim"]
    multiples: list[int] = [*config["dim_mult"]][::-1]
    grows_in_time = [*config["temperal_downsample"]][::-1]
    widths = [base * each for each in (multiples[0], *multiples)]
    latent, middle, residual = config["z_dim"], widths[0], bool(config.get("is_residual"))
    frames = scale = 1
    yield _Convolution(latent, latent, 1, frames, scale)
    yield _Convolution(latent, middle, 27, frames, scale)
    yield from [_Convolution(middle, middle, 27, frames, scale, norm=middle)] * 4
    yield _Convolution(middle, 3 * middle, 1, frames, scale, norm=middle)  # attention
    yield _Convolution(middle, middle, 1, frames, scale)
    for level, (before, after) in enumerate(pairwise(widths)):
        if level > 0 and not residual:
            before //= 2  # enlarging halves the channels
        yield _Convolution(before, after, 27, frames, scale, norm=before)
        more = 2 * config["num_res_blocks"] + 1
        yield from [_Convolution(after, after, 27, frames, scale, norm=after)] * more
        if before != after:
            yield _Convolution(before, after, 1, frames, scale)
        if level < len(grows_in_time):
            if grows_in_time[level]:
                yield _Convolution(after, 2 * after, 3, frames, scale)
                frames *= 2
            scale *= 2
            yield _Convolution(after, after if residual else after // 2, 9, frames, scale)
    patch = config.get("patch_size") or 1
    yield _Convolution(widths[-1], 3 * patch**2, 27, frames, scale, norm=widths[-1])


@dataclass(frozen=True)
class TaehvConfig:
    """Layer sizes of a TAEHV autoencoder. The defaults are those for Wan2.1 (taew2_1).

    Strides are (space, space, space) and (time, time, time) of the three decoder stages, the encoder mirrors them.
    `frames_to_trim`: leading decoded frames that a stream's first chunk does not show (Wan's 1 + 4n convention: 3).
    A file may have the decoder alone, without an encoder.
    """

    latent_channels: Count = 16
    patch_size: Count = 1
    decoder_widths: tuple[Count, Count, Count, Count] = (256, 128, 64, 64)
    decoder_blocks: _Blocks = (3, 3, 3)
    decoder_space: _Strides = (2, 2, 2)
    decoder_time: _Strides = (1, 2, 2)
    encoder_widths: tuple[Count, Count, Count, Count] = (64, 64, 64, 64)
    encoder_blocks: _Blocks = (3, 3, 3)
    frames_to_trim: Annotated[int, Field(ge=0)] = 3
    has_encoder: bool = True

    @property
    def spatial(self) -> int:
        """Pixels per latent pixel, each way."""
        return self.patch_size * self.decoder_space[0] * self.decoder_space[1] * self.decoder_space[2]

    @property
    def temporal(self) -> int:
        """Frames per latent frame."""
        return self.decoder_time[0] * self.decoder_time[1] * self.decoder_time[2]

    def decoder(self, height: int, width: int) -> DecoderSizes:
        """Sizes of the decoder, for latents of `height` x `width`."""
        return _sizes_of(self._decoder_layers(), _TAEHV_WORK, height, width)

    def _decoder_layers(self) -> Iterator[_Convolution]:
        widths, frames, scale = self.decoder_widths, 1, 1
        yield _Convolution(self.latent_channels, widths[0], 9, frames, scale)
        for (before, after), blocks, grows, lasts in zip(
            pairwise(widths), self.decoder_blocks, self.decoder_space, self.decoder_time, strict=True
        ):
            for _ in range(blocks):
                yield _Convolution(2 * before, before, 9, frames, scale, past=before)
                yield from [_Convolution(before, before, 9, frames, scale)] * 2
            yield _Convolution(before, lasts * before, 1, frames, scale, bias=False)
            frames, scale = frames * lasts, scale * grows
            yield _Convolution(before, after, 9, frames, scale, bias=False)
        yield _Convolution(widths[3], 3 * self.patch_size**2, 9, frames, scale)
