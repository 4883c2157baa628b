"""A decoder as steps: what a stream remembers goes in and comes out as tensors, so that a step can be compiled.

A *past* is what a stream remembers, by the number of the layer that will look at it: a tensor; None where the layer has
seen nothing; or a word that the layer itself has left there. A step changes none of what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.models.autoencoder.normalisation import Normalisation
from streamdiff.models.interfaces import StreamDecoder

DecoderState = Mapping[int, Tensor | str | None]
Step = Callable[[Tensor, DecoderState], tuple[Tensor, DecoderState]]
"""Normalised latents `[1, C, F, h, w]` and a past to frames `[n, 3, H, W]`, float in [0, 255], and the past after."""
Layout = Callable[[Tensor], Tensor]
"""Frames `[n, 3, H, W]`, float in [0, 255], to pictures in bytes."""


class VideoDecoder(StreamDecoder, Protocol):
    """A decoder whose `decode` is `decode_by` its own `step`, and which also gives frames as numbers.

    Sizes: `spatial` pixels per latent pixel each way, `temporal` frames per latent frame (but the first).
    `normalisation` leads from raw latents to normalised ones, None where the network knows the latter alone."""

    latent_channels: int
    spatial: int
    device: torch.device

    @property
    def normalisation(self) -> Normalisation | None: ...

    def frames_of(self, latents: int) -> int:
        """Frames that a stream's first `latents` latent frames give."""

    def decode_video(self, latents: Tensor, memory: Any) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` to frames float32 `[B, 3, n, H, W]` in [-1, 1]. Mutates: memory."""

    def lay_out(self, channels_last: bool) -> None:
        """Lay weights and pictures out with the channels last, or with the width, from now on; before any
        stream begins. Mutates: self."""

    def past(self, latents: Tensor, memory: Any) -> DecoderState:
        """What `memory` remembers. Raises ValueError for latents of another shape than the stream can go on with."""

    def pieces(self, latents: Tensor, past: DecoderState) -> Sequence[Tensor]:
        """Latents `[1, C, F, h, w]` as they go through steps, one after the other, the first of which sees `past`."""

    def step(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        """See `Step`."""

    def remember(self, latents: Tensor, memory: Any, past: DecoderState) -> int:
        """Take the past after `latents` into `memory`; returns how many of the frames in front are not shown.
        Mutates: memory."""


@torch.inference_mode()
def decode_by(step: Step, layout: Layout, decoder: VideoDecoder, latents: Tensor, memory: Any) -> Tensor:
    """Pictures of latents `[1, C, F, h, w]`; `step` computes what the decoder's own would. Mutates: memory.

    Raises:
        ValueError: as `VideoDecoder.past`.
    """
    past, pictures = decoder.past(latents, memory), []
    for piece in decoder.pieces(latents, past):
        frames, past = step(piece, past)
        pictures.append(layout(frames))
    hidden = decoder.remember(latents, memory, past)
    return (pictures[0] if len(pictures) == 1 else torch.cat(pictures))[hidden:]


def rgb24(frames: Tensor) -> Tensor:
    """Frames `[n, 3, H, W]`, float in [0, 255], as uint8 `[n, H, W, 3]`."""
    return frames.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


_RED, _BLUE = 0.2126, 0.0722
"""Shares of brightness, BT.709; green has the rest."""


def yuv420p(frames: Tensor) -> Tensor:
    """Frames `[n, 3, H, W]`, float in [0, 255], both sides even, as uint8 `[n, 3 H / 2, W]`: brightness, then the two
    planes of colour, one value for 2 x 2 pixels; BT.709 in limited range (ITU-R BT.709-6, 3 and 4). It is what
    libswscale makes of RGB, within two levels, where it takes a colour for the mean of its four pixels."""
    halved = F.avg_pool2d(frames, 2)
    blue_off, red_off = halved[:, 2] - _luma(halved), halved[:, 0] - _luma(halved)
    planes = (
        16 + _luma(frames) * (219 / 255),
        128 + blue_off * (224 / 255 / (2 - 2 * _BLUE)),
        128 + red_off * (224 / 255 / (2 - 2 * _RED)),
    )
    height, width = frames.shape[2:]
    joined = torch.cat([plane.flatten(1) for plane in planes], 1)
    return joined.round().to(torch.uint8).view(-1, height * 3 // 2, width)


def _luma(frames: Tensor) -> Tensor:
    """Brightness `[n, H, W]` of frames `[n, 3, H, W]`."""
    red, green, blue = frames.unbind(1)
    return _RED * red + (1 - _RED - _BLUE) * green + _BLUE * blue
