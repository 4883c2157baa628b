"""TAEHV autoencoders behind the same interface as Wan's: files in the published layout, streams, and what latents they
take.

Published files look alike and differ in their latents, which nothing in them tells: `taew2_1` takes *normalised* ones,
as the transformer makes them; `lighttaew2_1` takes *raw* ones. The wrong choice gives washed-out colours and no error,
so it is a field, never a guess. (Words: `streamdiff/models/autoencoder/normalisation.py`.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.memory_size import taehv_values
from streamdiff.models.autoencoder.normalisation import WAN_CHANNELS, WAN_MEAN, WAN_STD, Normalisation, split_whole
from streamdiff.models.autoencoder.stepped_decoder import DecoderState, decode_by, rgb24
from streamdiff.models.autoencoder.taehv import TAEHV, Config, Memory
from streamdiff.models.checkpoint.checkpoint import check_finite, check_fit, read_tensors
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.transformer.weights import FILE

LatentSpace = Literal["normalised", "raw"]
_RAW_NAME, _NORMALISED_NAME = "lighttae", "tae"


@dataclass(frozen=True)
class StreamingTaehv:
    """An autoencoder and the latents it takes: `normalisation` leads to them, None if they are the normalised ones."""

    autoencoder: TAEHV
    normalisation: Normalisation | None

    @property
    def latent_space(self) -> LatentSpace:
        """What the network itself takes."""
        return "normalised" if self.normalisation is None else "raw"


@dataclass
class EncodeMemory:
    """What a stream of frames remembers; `pending`: frames `[B, 3, n, H, W]` that do not make a latent frame yet."""

    past: Memory = field(default_factory=Memory)
    pending: Tensor | None = None


class _Half:
    """What decoder and encoder share."""

    def __init__(self, model: StreamingTaehv) -> None:
        self.model, self.config = model, model.autoencoder.config
        self.latent_channels, self.spatial = self.config.latent_channels, self.config.spatial
        self.temporal = self.config.temporal
        weight = next(model.autoencoder.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    @property
    def normalisation(self) -> Normalisation | None:
        """See `StreamingTaehv`."""
        return self.model.normalisation


class TaehvDecoder(_Half):
    """Latents to frames, behind the `StreamDecoder` protocol."""

    def new_memory(self) -> Memory:
        return Memory()

    def frames_of(self, latents: int) -> int:
        """Frames that a stream's first `latents` latent frames give."""
        return max(0, latents * self.temporal - self.config.frames_to_trim)

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes of a running stream's memory, for latents of `height` x `width`."""
        shape = self.config
        values = taehv_values(shape.decoder_widths, shape.decoder_blocks, shape.decoder_space, height, width)
        return self.dtype.itemsize * values

    def decode(self, latents: Tensor, memory: Memory) -> Tensor:
        """Normalised latents `[1, C, F, h, w]` to frames uint8 `[n, H, W, 3]`. Mutates: memory.

        Raises:
            ValueError: latents of another shape.
        """
        return decode_by(self.step, rgb24, self, latents, memory)

    @torch.inference_mode()
    def decode_video(self, latents: Tensor, memory: Memory) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` to frames float32 `[B, 3, n, H, W]` in [-1, 1]. Mutates: memory.

        Raises:
            ValueError: as `decode`.
        """
        self._check(latents)
        frames = self.model.autoencoder.decode(self._taken(latents), memory).float().clamp(0, 1)
        return frames.transpose(1, 2) * 2 - 1

    def lay_out(self, channels_last: bool) -> None:
        """See `VideoDecoder`; channels last, unless told otherwise."""
        self.model.autoencoder.lay_out(torch.channels_last if channels_last else torch.contiguous_format)

    def past(self, latents: Tensor, memory: Memory) -> DecoderState:
        """See `VideoDecoder`: a stream that has not begun remembers zeros, so that all its steps are alike."""
        self._check(latents)
        return memory.past or self.model.autoencoder.blank(latents.to(self.dtype).transpose(1, 2))

    def pieces(self, latents: Tensor, past: DecoderState) -> tuple[Tensor]:
        return (latents,)

    def step(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        frames, after = self.model.autoencoder.decode_step(self._taken(piece), cast(dict[int, Tensor], past))
        return frames[0].float().clamp(0, 1) * 255, after

    def remember(self, latents: Tensor, memory: Memory, past: DecoderState) -> int:
        memory.past = cast(dict[int, Tensor], past)
        return self.model.autoencoder.trim(memory)

    def _check(self, latents: Tensor) -> None:
        if latents.ndim != 5 or latents.shape[1] != self.latent_channels or 0 in latents.shape:
            raise ValueError(f"latents are {list(latents.shape)}; expected [B, {self.latent_channels}, F, h, w]")

    def _taken(self, latents: Tensor) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` as the network takes them: `[B, F, C, h, w]`, in its dtype."""
        if self.model.normalisation is not None:
            latents = self.model.normalisation.undo(latents)
        return latents.to(self.dtype).transpose(1, 2)


class TaehvEncoder(_Half):
    """Frames to latents. Each latent frame takes `temporal` frames, the first one too; others wait in the memory."""

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
        if video.ndim != 5 or video.shape[1] != 3 or 0 in video.shape:
            raise ValueError(f"frames are {list(video.shape)}; expected [B, 3, n, H, W], n at least 1")
        batch, _, _, height, width = video.shape
        if height % self.spatial or width % self.spatial:
            raise ValueError(f"frames are {width} x {height}; both sides must be multiples of {self.spatial}")
        whole, memory.pending = split_whole(memory.pending, video, self.temporal, self.temporal)
        if not whole.shape[2]:
            shape = (batch, self.latent_channels, 0, height // self.spatial, width // self.spatial)
            return video.new_empty(shape, dtype=torch.float32)
        frames = ((whole.float() + 1) / 2).to(self.dtype).transpose(1, 2)
        latents = self.model.autoencoder.encode(frames, memory.past).transpose(1, 2).float()
        return latents if self.model.normalisation is None else self.model.normalisation.apply(latents)

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
    return "encoder.0.weight" in names


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


def from_tensors(
    path: Path, tensors: Mapping[str, Tensor], space: LatentSpace, device: torch.device, dtype: torch.dtype
) -> StreamingTaehv:
    """The autoencoder of a file in the published layout; channels, patch size and strides come from the shapes.

    Raises:
        ConfigError: tensors missing, unexpected, misshapen or not finite, which are listed; raw latents with another
            number of channels than Wan2.1's, whose mean and standard deviation are then unknown.
    """
    config = _config_of(path, tensors)
    normalisation = None
    if space == "raw":
        if config.latent_channels != WAN_CHANNELS:
            raise ConfigError(
                f"{path} has {config.latent_channels} latent channels; mean and standard deviation are known for "
                f"{WAN_CHANNELS} only, so it can take normalised latents only"
            )
        normalisation = Normalisation(WAN_MEAN, WAN_STD, device)
    return StreamingTaehv(build(path, tensors, config, device, dtype), normalisation)


def load_folder(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> StreamingTaehv:
    """The autoencoder of a folder with weights and a `config.json`: the fields of `Config`, latents_mean, latents_std.

    Raises:
        ConfigError: a file is missing or damaged; the configuration lacks what is in no tensor; as `build`.
    """
    stored, file = read_object(folder / "config.json"), folder / FILE
    if missing := [key for key in ("latents_mean", "latents_std") if key not in stored]:
        raise ConfigError(f"{folder / 'config.json'} has no {' and no '.join(missing)}")
    autoencoder = build(file, read_tensors(file), config_from(stored), device, dtype)
    return StreamingTaehv(autoencoder, Normalisation(stored["latents_mean"], stored["latents_std"], device))


def config_from(stored: Mapping[str, Any]) -> Config:
    """The shape in a `config.json`; what it does not say is as in the published network."""
    known = {field.name for field in fields(Config)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known}
    return Config(**values)


def build(path: Path, tensors: Mapping[str, Tensor], config: Config, device: torch.device, dtype: torch.dtype) -> TAEHV:
    """The module with these weights.

    Raises:
        ConfigError: tensors missing, unexpected, misshapen or not finite, which are listed.
    """
    with torch.device("meta"):
        autoencoder = TAEHV(config)
    check_fit(path, tensors, {name: tensor.shape for name, tensor in autoencoder.state_dict().items()})
    check_finite(path, tensors)
    autoencoder.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    autoencoder.eval().requires_grad_(False).lay_out(torch.channels_last)
    return autoencoder


def _config_of(path: Path, tensors: Mapping[str, Tensor]) -> Config:
    """The published shape, with what the tensors tell otherwise: channels, patch size and strides in time."""

    def size(name: str, axis: int) -> int:
        if name not in tensors or tensors[name].ndim != 4:
            raise ConfigError(
                f"{path} has no tensor {name} [.., .., .., ..]; expected a TAEHV in the published layout (its wider "
                "`super` decoders are not supported)"
            )
        return tensors[name].shape[axis]

    time = [size(f"decoder.{index}.conv.weight", 0) // size(f"decoder.{index}.conv.weight", 1) for index in (7, 13, 19)]
    return Config(
        latent_channels=size("decoder.1.weight", 1),
        patch_size=math.isqrt(size("encoder.0.weight", 1) // 3),
        decoder_time=(time[0], time[1], time[2]),
        frames_to_trim=math.prod(time) - 1,
    )
