"""TAEHV autoencoders behind the same interface as Wan's: files in the published layout, streams, and what latents they
take.

Published files look alike and differ in their latents, which nothing in them tells: `taew2_1` takes *normalised* ones,
as the transformer makes them; `lighttaew2_1` takes *raw* ones. The wrong choice gives washed-out colours and no error,
so it is a field, never a guess. (Words: `streamdiff/models/autoencoder/normalisation.py`.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.normalisation import (
    WAN_CHANNELS,
    WAN_MEAN,
    WAN_STD,
    Normalisation,
    check_shape,
    split_whole,
)
from streamdiff.models.autoencoder.picture_decoder import DecoderState
from streamdiff.models.autoencoder.taehv import TAEHV, Memory, TaehvConfig, memory_dtype
from streamdiff.session_state.fields import STATE, session_state

TAEHV_CLASS = "TAEHV"
"""What `config.json` calls it."""
LatentSpace = Literal["normalised", "raw"]
_RAW_NAME, _NORMALISED_NAME = "lighttae", "tae"


@session_state("taehv-encode-memory")
@dataclass
class EncodeMemory:
    """State of an encoded stream between calls; `pending`: frames `[B, 3, n, H, W]` short of a full latent frame."""

    past: Memory = field(default_factory=Memory, metadata=STATE)
    pending: Tensor | None = field(default=None, metadata=STATE)


class _Half:
    """Base of decoder and encoder: sizes, device and dtype. `normalisation` leads to the latents that the network
    takes, None if they are the normalised ones."""

    def __init__(self, autoencoder: TAEHV, normalisation: Normalisation | None) -> None:
        self.autoencoder, self.config, self.normalisation = autoencoder, autoencoder.config, normalisation
        self.latent_channels, self.spatial = self.config.latent_channels, self.config.spatial
        self.temporal = self.config.temporal
        weight = next(autoencoder.parameters())
        self.device, self.dtype = weight.device, weight.dtype


class TaehvDecoder(_Half):
    """Latents to frames, a `VideoDecoder`."""

    def __init__(self, autoencoder: TAEHV, normalisation: Normalisation | None) -> None:
        super().__init__(autoencoder, normalisation)
        self.layers: nn.Module = autoencoder.decoder

    def new_memory(self) -> Memory:
        return Memory()

    def frames_of(self, latents: int) -> int:
        """Frames that a stream's first `latents` latent frames give."""
        return max(0, latents * self.temporal - self.config.frames_to_trim)

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes of a running stream's memory, for latents of `height` x `width`."""
        return memory_dtype(self.device, self.dtype).itemsize * self.config.memory_values(height, width)

    @torch.inference_mode()
    def decode_video(self, latents: Tensor, memory: Memory) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` to frames float32 `[B, 3, n, H, W]` in [-1, 1]. Mutates: memory.

        Raises:
            ValueError: latents of another shape than that, or than the stream began with.
        """
        check_shape("latents", latents, self.latent_channels)
        frames = self.autoencoder.decode(self._taken(latents), memory).float().clamp(0, 1)
        return frames.transpose(1, 2) * 2 - 1

    def set_channels_last(self, channels_last: bool) -> None:
        """See `VideoDecoder`; channels last, unless told otherwise."""
        self.autoencoder.set_memory_format(torch.channels_last if channels_last else torch.contiguous_format)

    def past(self, latents: Tensor, memory: Memory) -> DecoderState:
        """See `VideoDecoder`: a stream that has not begun remembers zeros, so that all its steps are alike."""
        check_shape("latents", latents, self.latent_channels)
        return memory.past or self.autoencoder.blank(latents.to(self.dtype).transpose(1, 2))

    def pieces(self, latents: Tensor, past: DecoderState) -> tuple[Tensor]:
        return (latents,)

    def step(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        frames, after = self.autoencoder.decode_step(self._taken(piece), cast(dict[int, Tensor], past))
        return frames[0].float().clamp(0, 1) * 255, after

    def remember(self, latents: Tensor, memory: Memory, past: DecoderState) -> int:
        memory.past = cast(dict[int, Tensor], past)
        return self.autoencoder.trim(memory)

    def _taken(self, latents: Tensor) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` as the network takes them: `[B, F, C, h, w]`, in its dtype."""
        if self.normalisation is not None:
            latents = self.normalisation.undo(latents)
        return latents.to(self.dtype).transpose(1, 2)


class TaehvEncoder(_Half):
    """Frames to latents. Each latent frame takes `temporal` frames, the first one too; others wait in the memory."""

    @property
    def first_frames(self) -> int:
        return self.temporal

    def new_memory(self) -> EncodeMemory:
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
        batch, height, width = check_shape("frames", video, 3, self.spatial)
        whole, memory.pending = split_whole(memory.pending, video, self.temporal, self.temporal)
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


def space_of(path: Path, given: str | None) -> LatentSpace:
    """The latents that the network in a file takes: as `given`, else by the name that its author published it under.

    Raises:
        ConfigError: neither says.
    """
    name = path.name.lower()
    if given == "raw" or (given is None and name.startswith(_RAW_NAME)):
        return "raw"
    if given == "normalised" or (given is None and name.startswith(_NORMALISED_NAME)):
        return "normalised"
    allowed = " or ".join(get_args(LatentSpace))
    if given is not None:
        raise ConfigError(f"the latent space is {given!r}, but must be {allowed}")
    raise ConfigError(
        f"{path} does not tell which latents it takes: say so with --latent-space {allowed} (taew2_1 takes "
        "normalised, lighttaew2_1 raw ones; the wrong one gives washed-out colours)"
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
        stored: a `config.json`: fields of `TaehvConfig`, latents_mean and latents_std. None: channels, widths, blocks,
            patch size and strides in time come from names and shapes.
        latent_space: without `stored`, see `space_of`.

    Raises:
        ConfigError: raw latents with another number of channels than Wan2.1's, whose mean and standard deviation are
            then unknown; a configuration that lacks what is in no tensor.
    """
    if stored is None:
        config, space = _config_of(path, tensors), space_of(path, latent_space)
        if space == "normalised":
            return config, None
        if config.latent_channels != WAN_CHANNELS:
            raise ConfigError(
                f"{path} has {config.latent_channels} latent channels; mean and standard deviation are known for "
                f"{WAN_CHANNELS} only, so it can take normalised latents only"
            )
        mean, std = WAN_MEAN, WAN_STD
    else:
        if missing := [key for key in ("latents_mean", "latents_std") if key not in stored]:
            raise ConfigError(f"{path / 'config.json'} has no {' and no '.join(missing)}")
        config, mean, std = config_from(stored), stored["latents_mean"], stored["latents_std"]
    return config, Normalisation(mean, std, device)


def config_from(stored: Mapping[str, Any]) -> TaehvConfig:
    """The shape in a `config.json`; what it does not say is as in the published network."""
    known = {field.name for field in fields(TaehvConfig)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known}
    return TaehvConfig(**values)


def _config_of(path: Path, tensors: Mapping[str, Tensor]) -> TaehvConfig:
    """Layer sizes inferred from names and shapes of the tensors. Strides in space cannot be: 2 in each stage, as
    published.

    Raises:
        ConfigError: not the published layout.
    """

    def size(name: str, axis: int) -> int:
        if name not in tensors or tensors[name].ndim != 4:
            raise ConfigError(
                f"{path} has no tensor {name} [.., .., .., ..]; expected a TAEHV in the published layout, of any width"
            )
        return tensors[name].shape[axis]

    grows = _stages(path, tensors, "decoder")
    last = grows[2] + 3  # behind a convolution and a ReLU
    time = [size(f"decoder.{index}.conv.weight", 0) // size(f"decoder.{index}.conv.weight", 1) for index in grows]
    widths = [size(f"decoder.{index}.conv.weight", 1) for index in grows]
    # Between stages stand a convolution, the blocks, and what enlarges, which has no weights.
    blocks = [index - 1 - first for first, index in zip((3, grows[0] + 2, grows[1] + 2), grows, strict=True)]
    config = TaehvConfig(
        latent_channels=size("decoder.1.weight", 1),
        patch_size=math.isqrt(size(f"decoder.{last}.weight", 0) // 3),
        decoder_widths=(widths[0], widths[1], widths[2], size(f"decoder.{last - 2}.weight", 0)),
        decoder_blocks=(blocks[0], blocks[1], blocks[2]),
        decoder_time=(time[0], time[1], time[2]),
        frames_to_trim=math.prod(time) - 1,
    )
    if not any(name.startswith("encoder.") for name in tensors):
        return replace(config, has_encoder=False)
    pools = _stages(path, tensors, "encoder")
    ends = [*pools[1:], max(index for index in _numbers(tensors, r"encoder\.(\d+)\.weight"))]
    blocks = [end - index - 2 for index, end in zip(pools, ends, strict=True)]
    widths = [size(f"encoder.{index}.conv.weight", 0) for index in pools]
    return replace(
        config,
        encoder_widths=(widths[0], widths[1], widths[2], size(f"encoder.{pools[2] + 1}.weight", 0)),
        encoder_blocks=(blocks[0], blocks[1], blocks[2]),
    )


def _stages(path: Path, tensors: Mapping[str, Tensor], half: str) -> list[int]:
    """Numbers of the three modules of a half that change the frame rate, one in each stage."""
    found = _numbers(tensors, rf"{half}\.(\d+)\.conv\.weight")
    if len(found) != 3:
        numbers = ", ".join(map(str, found)) or "none"
        raise ConfigError(
            f"{path} has {len(found)} tensors {half}.N.conv.weight ({numbers}); a TAEHV in the published layout has 3"
        )
    return found


def _numbers(tensors: Mapping[str, Tensor], pattern: str) -> list[int]:
    """The numbers in the names that fit, rising."""
    return sorted(int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name)))
