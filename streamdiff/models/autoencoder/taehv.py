"""A tiny streaming video autoencoder in the TAEHV layout (madebyollin/taehv, MIT; layout only, own code), behind the
same interface as Wan's: network, files, streams.

Module indices inside `encoder` and `decoder` follow that project, so its state-dict keys fit a full-size `TaehvConfig`;
the embedded model uses the same classes with small widths. Weights are separate from streams: a stream's memory is a
`TaehvMemory`, passed in and updated in place. The network's frames are `[B, T, 3, H, W]` in [0, 1], its latents
`[B, T, C, h, w]`.

Published files look alike and differ in their latents, which nothing in them tells: `taew2_1` takes *normalised* ones,
as the transformer makes them; `lighttaew2_1` takes *raw* ones. The wrong choice gives washed-out colours and no error,
so it is a field, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder import picture_decoder
from streamdiff.models.autoencoder.memory_size import TaehvConfig as TaehvConfig
from streamdiff.models.autoencoder.picture_decoder import DecoderState, Normalisation
from streamdiff.models.weight_files import validated
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
class TaehvMemory:
    """A stream's state between calls: the last input frame `[B, C, H, W]` of every MemBlock, in order.

    Empty until the first call, which then starts from zeros. `first` tells whether a frame has been shown yet.
    """

    past: dict[int, Tensor] = field(default_factory=dict, metadata=STATE)
    first: bool = field(default=True, metadata=STATE)


def memory_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What layers of `dtype` keep of a stream in: float32 on a CPU, some of which decode in bfloat16 and some do not
    (`device.embedded_autoencoder_dtype`), so that a saved stream continues on either."""
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

    def encode(self, frames: Tensor, memory: TaehvMemory) -> Tensor:
        """Encode `[B, T, 3, H, W]` frames in [0, 1], T a multiple of `temporal`. Mutates: memory.

        Returns latents `[B, T / temporal, C, H / spatial, W / spatial]`.
        """
        batch = frames.shape[0]
        x = frames.flatten(0, 1)
        if self.config.patch_size > 1:
            x = F.pixel_unshuffle(x, self.config.patch_size)
        latents, memory.past = run(self.encoder, x.unflatten(0, (batch, -1)), memory.past, self.layout)
        return latents

    def decode(self, latents: Tensor, memory: TaehvMemory) -> Tensor:
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

    def trim(self, memory: TaehvMemory) -> int:
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


TAEHV_CLASS = "TAEHV"
"""What `config.json` calls it."""
_PUBLISHED = {
    "taew2_1": "normalised",
    "taew2_2": "normalised",
    "lighttaew2_1": "raw",
    "lighttaew2_2": "raw",
}
"""Which latents the networks take that were published under these names. Others are called alike: `taehv`, `taecvx` and
`lighttaehy1_5` are for other models' latents."""
_FIRST, _LAST = "decoder.1.weight", "decoder.22.weight"
"""Of a decoder's first and last convolution."""


@session_state("taehv-encode-memory")
@dataclass
class EncodeMemory:
    """State of an encoded stream between calls; `pending`: frames `[B, 3, n, H, W]` short of a full latent frame."""

    past: TaehvMemory = field(default_factory=TaehvMemory, metadata=STATE)
    pending: Tensor | None = field(default=None, metadata=STATE)


class TaehvAutoencoder:
    """A `VideoAutoencoder`. `normalisation` leads to the latents that the network takes, None if they are the
    normalised ones. To encode, each latent frame takes `temporal` frames, the first one too; others wait in the memory.
    """

    def __init__(self, autoencoder: TAEHV, normalisation: Normalisation | None) -> None:
        self.autoencoder, self.config, self.normalisation = autoencoder, autoencoder.config, normalisation
        self.latent_channels, self.spatial = self.config.latent_channels, self.config.spatial
        self.temporal = self.first_frames = self.config.temporal
        self.layers: nn.Module = autoencoder.decoder
        weight = next(autoencoder.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    def new_memory(self) -> TaehvMemory:
        return TaehvMemory()

    def frames_of(self, latents: int) -> int:
        """Frames that a stream's first `latents` latent frames give."""
        return max(0, latents * self.temporal - self.config.frames_to_trim)

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes of a running stream's memory, for latents of `height` x `width`."""
        return memory_dtype(self.device, self.dtype).itemsize * self.config.decoder(height, width).remembered

    @torch.inference_mode()
    def decode_video(self, latents: Tensor, memory: TaehvMemory) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` to frames float32 `[B, 3, n, H, W]` in [-1, 1]. Mutates: memory.

        Raises:
            ValueError: latents of another shape than that, or than the stream began with.
        """
        picture_decoder.check_shape("latents", latents, self.latent_channels)
        frames = self.autoencoder.decode(self._taken(latents), memory).float().clamp(0, 1)
        return frames.transpose(1, 2) * 2 - 1

    def set_channels_last(self, channels_last: bool) -> None:
        """See `VideoAutoencoder`; channels last, unless told otherwise."""
        self.autoencoder.set_memory_format(torch.channels_last if channels_last else torch.contiguous_format)

    def past(self, latents: Tensor, memory: TaehvMemory) -> DecoderState:
        """See `VideoAutoencoder`: a stream that has not begun remembers zeros, so that all its steps are alike."""
        picture_decoder.check_shape("latents", latents, self.latent_channels)
        return memory.past or self.autoencoder.blank(latents.to(self.dtype).transpose(1, 2))

    def pieces(self, latents: Tensor, past: DecoderState) -> tuple[Tensor]:
        return (latents,)

    def step(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        frames, after = self.autoencoder.decode_step(self._taken(piece), cast(dict[int, Tensor], past))
        return frames[0].float().clamp(0, 1) * 255, after

    def remember(self, latents: Tensor, memory: TaehvMemory, past: DecoderState) -> int:
        memory.past = cast(dict[int, Tensor], past)
        return self.autoencoder.trim(memory)

    def _taken(self, latents: Tensor) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` as the network takes them: `[B, F, C, h, w]`, in its dtype."""
        if self.normalisation is not None:
            latents = self.normalisation.undo(latents)
        return latents.to(self.dtype).transpose(1, 2)

    def new_encode_memory(self) -> EncodeMemory:
        return EncodeMemory()

    def latents_of(self, frames: int) -> int:
        """Latent frames that a clip of `frames` frames becomes.

        Raises:
            ConfigError: no frame.
        """
        if frames < 1:
            raise ConfigError("there are no frames to encode")
        return math.ceil(frames / self.temporal)

    @torch.inference_mode()
    def encode(self, video: Tensor, memory: EncodeMemory) -> Tensor:
        """Frames `[B, 3, n, H, W]` in [-1, 1], n at least 1, to normalised latents float32 `[B, C, F, h, w]`; F may be
        0. Mutates: memory.

        Raises:
            ValueError: frames of another shape; sides that are no multiple of `spatial`.
        """
        batch, height, width = picture_decoder.check_shape("frames", video, 3, self.spatial)
        whole, memory.pending = picture_decoder.split_whole(memory.pending, video, self.temporal, self.temporal)
        if not whole.shape[2]:
            shape = (batch, self.latent_channels, 0, height // self.spatial, width // self.spatial)
            return video.new_empty(shape, dtype=torch.float32)
        frames = ((whole.float() + 1) / 2).to(self.dtype).transpose(1, 2)
        latents = self.autoencoder.encode(frames, memory.past).transpose(1, 2).float()
        return latents if self.normalisation is None else self.normalisation.apply(latents)

    def finish(self, memory: EncodeMemory) -> Tensor | None:
        """The last latent frame, if frames are left over: the last one is repeated until they are enough, as the
        published code does. Mutates: memory."""
        if memory.pending is None:
            return None
        missing = self.temporal - memory.pending.shape[2]
        return self.encode(memory.pending[:, :, -1:].repeat(1, 1, missing, 1, 1), memory)


# ---- files ------------------------------------------------------------------------------------------------------


def is_taehv(names: Mapping[str, Tensor]) -> bool:
    """Whether tensors of these names are in the published layout: numbered modules."""
    return "decoder.1.weight" in names or "encoder.0.weight" in names


def space_of(path: Path, given: str | None) -> str:
    """The latents that the network in a file takes: as `given`, else by the name that its author published it under.

    Raises:
        ConfigError: neither says.
    """
    if (known := given or _PUBLISHED.get(path.stem.lower())) is not None:
        return known
    raise ConfigError(
        f"{path} does not tell which latents it takes, by none of the names {', '.join(_PUBLISHED)}: say so with "
        "--latent-space normalised or raw (taew2_1 takes normalised, lighttaew2_1 raw ones; the wrong one gives "
        "washed-out colours, and so does a decoder of another model)"
    )


def read_taehv(
    path: Path,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, Any] | None,
    latent_space: str | None,
    device: torch.device,
) -> tuple[TaehvConfig, Normalisation | None]:
    """Layer sizes of the network, and the normalisation of its latents (None: it takes normalised ones); `path` is for
    messages.

    Args:
        stored: a `config.json`: fields of `TaehvConfig`, latents_mean and latents_std. None: as published, with the
            channels and patch size of the shapes.
        latent_space: without `stored`, see `space_of`.

    Raises:
        ConfigError: raw latents with another number of channels than Wan's, whose mean and standard deviation are then
            unknown; a configuration that lacks what is in no tensor.
    """
    if stored is None:
        config, space = _config_of(path, tensors), space_of(path, latent_space)
        if space == "normalised":
            return config, None
        stored = picture_decoder.wan_config(path, config.latent_channels)
    else:
        if missing := [key for key in ("latents_mean", "latents_std") if key not in stored]:
            raise ConfigError(f"{path / 'config.json'} has no {' and no '.join(missing)}")
        config = validated(path / "config.json", TaehvConfig, stored)
    return config, Normalisation(stored["latents_mean"], stored["latents_std"], device)


def _config_of(path: Path, tensors: Mapping[str, Tensor]) -> TaehvConfig:
    """The published layout, with the latent channels and the patch size that the tensors have.

    Raises:
        ConfigError: not that layout.
    """
    for name in (_FIRST, _LAST):
        if name not in tensors or tensors[name].ndim != 4:
            raise ConfigError(f"{path} has no tensor {name} [.., .., .., ..]; expected a TAEHV in the published layout")
    return TaehvConfig(
        latent_channels=tensors[_FIRST].shape[1],
        patch_size=max(1, math.isqrt(tensors[_LAST].shape[0] // 3)),
        has_encoder=any(name.startswith("encoder.") for name in tensors),
    )
