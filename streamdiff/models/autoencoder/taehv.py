"""A tiny streaming video autoencoder in the TAEHV layout (madebyollin/taehv, MIT; layout only, own code).

Module indices inside `encoder` and `decoder` follow that project, so its state-dict keys fit a full-size `TaehvConfig`;
the embedded model uses the same classes with small widths. Weights are separate from streams: a stream's memory is a
`Memory`, passed in and updated in place. Frames are `[B, T, 3, H, W]` in [0, 1], latents `[B, T, C, h, w]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamdiff.models.autoencoder.memory_size import TaehvConfig as TaehvConfig
from streamdiff.session_state.fields import STATE, session_state


def _conv(n_in: int, n_out: int, *, bias: bool = True, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=bias, stride=stride)


class Clamp(nn.Module):
    """Soft limit of latents to (-3, 3)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class MemBlock(nn.Module):
    """Residual block that sees the frame before: `relu(conv([x, past]) + x)`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.conv: nn.Sequential = nn.Sequential(
            _conv(channels * 2, channels),
            nn.ReLU(inplace=True),
            _conv(channels, channels),
            nn.ReLU(inplace=True),
            _conv(channels, channels),
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        out: Tensor = self.act(self.conv(torch.cat([x, past], 1)) + x)
        return out


class TPool(nn.Module):
    """Merge `stride` frames into one."""

    def __init__(self, n_f: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(n_f * stride, n_f, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        frames, channels, height, width = x.shape
        out: Tensor = self.conv(x.reshape(frames // self.stride, self.stride * channels, height, width))
        return out


class TGrow(nn.Module):
    """Make `stride` frames out of one, and each `scale` times as wide and high (nearest pixel).

    The layout enlarges first. Its 1x1 convolution gives the same on the small picture, with `scale` squared times
    less to do.
    """

    def __init__(self, n_f: int, stride: int, scale: int = 1) -> None:
        super().__init__()
        self.stride, self.scale = stride, scale
        self.conv = nn.Conv2d(n_f, n_f * stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pixels = F.linear(x.permute(0, 2, 3, 1), self.conv.weight.flatten(1))
        frames = pixels.unflatten(-1, (self.stride, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1).permute(0, 3, 1, 2)
        return F.interpolate(frames, scale_factor=self.scale) if self.scale > 1 else frames


@session_state("taehv-memory")
@dataclass
class Memory:
    """A stream's state between calls: the last input frame `[B, C, H, W]` of every MemBlock, in order.

    Empty until the first call, which then starts from zeros. `first` tells whether a frame has been shown yet.
    """

    past: dict[int, Tensor] = field(default_factory=dict, metadata=STATE)
    first: bool = field(default=True, metadata=STATE)


def memory_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What layers of `dtype` keep of a stream in: float32 on a CPU, some of which decode in bfloat16 and some do not
    (`device.embedded_autoencoder_dtype`), so that a saved stream goes on on either."""
    return torch.float32 if device.type == "cpu" else dtype


def run(
    layers: nn.Sequential, x: Tensor, past: Mapping[int, Tensor], layout: torch.memory_format = torch.channels_last
) -> tuple[Tensor, dict[int, Tensor]]:
    """Apply `layers` to a chunk `[B, T, C, H, W]`, all frames of the chunk at once.

    `past` is the last input frame of every MemBlock before the chunk, and that after it comes back, in `memory_dtype`;
    of what is not in it, zeros are taken. Pictures lie in `layout` on the way.
    """
    batch, after, remembered = x.shape[0], {}, memory_dtype(x.device, x.dtype)
    x = x.flatten(0, 1).contiguous(memory_format=layout)
    for index, layer in enumerate(layers):
        if isinstance(layer, MemBlock):
            frames = x.unflatten(0, (batch, -1))
            before = past.get(index)
            if before is None:
                before = torch.zeros_like(frames[:, 0])
            shifted = torch.cat([before.to(x.dtype).unsqueeze(1), frames[:, :-1]], 1).flatten(0, 1)
            # A copy, which does not keep the chunk, in a layout that is always the same: a graph is made for it.
            last = frames[:, -1]
            if not torch.is_grad_enabled():
                last = last.to(remembered, copy=True, memory_format=layout)
            after[index] = last
            x = layer(x, shifted.contiguous(memory_format=layout))
        else:
            x = layer(x)
    out: Tensor = x.unflatten(0, (batch, -1))
    return out, after


class TAEHV(nn.Module):
    """Weights only; `encode` and `decode` take the stream's memory as an argument."""

    def __init__(self, config: TaehvConfig) -> None:
        super().__init__()
        self.config, self.layout = config, torch.channels_last
        image = 3 * config.patch_size**2
        e, eb = config.encoder_widths, config.encoder_blocks
        layers: list[nn.Module] = [_conv(image, e[0]), nn.ReLU(inplace=True)]
        space, time = config.decoder_space[::-1], config.decoder_time[::-1]
        for i in range(3):
            layers += [TPool(e[i], time[i]), _conv(e[i], e[i + 1], stride=space[i], bias=False)]
            layers += [MemBlock(e[i + 1]) for _ in range(eb[i])]
        layers.append(_conv(e[3], config.latent_channels))
        self.encoder = nn.Sequential(*(layers if config.has_encoder else ()))

        d, db = config.decoder_widths, config.decoder_blocks
        layers = [Clamp(), _conv(config.latent_channels, d[0]), nn.ReLU(inplace=True)]
        for i in range(3):
            layers += [MemBlock(d[i]) for _ in range(db[i])]
            layers += [nn.Identity(), TGrow(d[i], config.decoder_time[i], config.decoder_space[i])]
            layers += [_conv(d[i], d[i + 1], bias=False)]
        self.decoder = nn.Sequential(*layers, nn.ReLU(inplace=True), _conv(d[3], image))

    def set_memory_format(self, layout: torch.memory_format) -> None:
        """Lay convolutions and pictures out so from now on. Mutates: self."""
        self.layout = layout
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.data = module.weight.data.contiguous(memory_format=layout)

    def encode(self, frames: Tensor, memory: Memory) -> Tensor:
        """Encode `[B, T, 3, H, W]` frames in [0, 1], T a multiple of `temporal`. Mutates: memory.

        Returns latents `[B, T / temporal, C, H / spatial, W / spatial]`.
        """
        batch = frames.shape[0]
        x = frames.flatten(0, 1)
        if self.config.patch_size > 1:
            x = F.pixel_unshuffle(x, self.config.patch_size)
        latents, memory.past = run(self.encoder, x.unflatten(0, (batch, -1)), memory.past, self.layout)
        return latents

    def decode(self, latents: Tensor, memory: Memory) -> Tensor:
        """Decode `[B, T, C, h, w]` latents into the frames they stand for. Mutates: memory.

        Returns `[B, T * temporal - trimmed, 3, H, W]`, not clamped; `trimmed` is `frames_to_trim` on a stream's first
        call and 0 after. Decoding a stream in any chunks gives the frames of decoding it whole.
        """
        frames, memory.past = self.decode_step(latents, memory.past)
        return frames[:, self.trim(memory) :]

    def decode_step(self, latents: Tensor, past: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
        """As `decode`, but nothing is trimmed; what is remembered goes in and comes out as in `run`."""
        x, after = run(self.decoder, latents, past, self.layout)
        batch = x.shape[0]
        if self.config.patch_size > 1:
            x = F.pixel_shuffle(x.flatten(0, 1), self.config.patch_size).unflatten(0, (batch, -1))
        return x, after

    def trim(self, memory: Memory) -> int:
        """Leading frames of this call that are not shown. Mutates: memory, whose stream has then begun."""
        trimmed = self.config.frames_to_trim if memory.first else 0
        memory.first = False
        return trimmed

    def blank(self, latents: Tensor) -> dict[int, Tensor]:
        """The memory of a stream before its first frame: zeros, in the layout and dtype in which `run` leaves them; for
        `latents` `[B, T, C, h, w]`."""
        (batch, _, _, height, width), past = latents.shape, {}
        for index, layer in enumerate(self.decoder):
            if isinstance(layer, MemBlock):
                shape = batch, layer.channels, height, width
                zeros = latents.new_zeros(shape, dtype=memory_dtype(latents.device, latents.dtype))
                past[index] = zeros.contiguous(memory_format=self.layout)
            elif isinstance(layer, TGrow):
                height, width = height * layer.scale, width * layer.scale
        return past
