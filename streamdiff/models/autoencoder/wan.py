"""The Wan autoencoder, piece by piece: diffusers' modules, with the frames that causal convolutions look back on kept
in a memory that belongs to the stream. Decoding or encoding in any pieces gives what `AutoencoderKLWan` gives for the
whole clip.

Weights are held and never changed; a stream's memory is an argument. The first latent frame is one picture, each later
one is `temporal` (4) pictures. All methods run without gradients.

Files have diffusers' tensor names, or those of `Wan2.1_VAE.pth`, with the same shapes: two residual blocks a level in
the encoder, three in the decoder; or those of `Wan2.2_VAE.pth`, whose levels are nested. The layout is recognised from
the names, and without a configuration the architecture from the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanCausalConv3d,
    WanResample,
    patchify,
    unpatchify,
)
from torch import Tensor, nn

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder import picture_decoder
from streamdiff.models.autoencoder.memory_size import wan_decoder
from streamdiff.models.autoencoder.picture_decoder import DecoderState, Normalisation
from streamdiff.models.weight_files import some, what_it_holds
from streamdiff.session_state.fields import STATE, session_state


@session_state("wan-memory")
@dataclass
class WanMemory:
    """A stream's state between calls: the inputs that causal convolutions look back on.

    `features`: one entry per causal convolution, in the order they run: None before its first call, then its last one
    or two input frames (diffusers writes "Rep" into one that has seen a single frame). `size`: (batch, height, width)
    of the stream's pieces. `pending`: frames to encode that do not make a whole group yet. Its size does not depend on
    the stream's length; `wan_decoder` counts it: to decode Wan2.1 at 480x832, 3.8 GB in float32, half that in bfloat16.
    """

    features: list[Tensor | str | None] = field(default_factory=list, metadata=STATE)
    size: tuple[int, int, int] | None = field(default=None, metadata=STATE)
    pending: Tensor | None = field(default=None, metadata=STATE)


def _check(what: str, piece: Tensor, channels: int, memory: WanMemory, spatial: int = 1) -> tuple[int, int, int]:
    """See `check_shape`; ValueError also where the stream began with another size."""
    size = picture_decoder.check_shape(what, piece, channels, spatial)
    if memory.size not in (None, size):
        raise ValueError(f"{what} have (batch, height, width) {size}, but the stream began with {memory.size}")
    return size


def _features(memory: WanMemory, half: nn.Module) -> list[Tensor | str | None]:
    """A copy to work on: a call that fails half-way leaves the stream as it was."""
    return list(memory.features) or [None] * sum(isinstance(module, WanCausalConv3d) for module in half.modules())


def _begins(past: DecoderState) -> bool:
    return all(feature is None for feature in past.values())


def _double_frames(
    self: WanResample, x: Tensor, feat_cache: list[Tensor | str | None] | None = None, feat_idx: list[int] | None = None
) -> Tensor:
    """`WanResample.forward` of mode `upsample3d`, which tells what is kept by its type: the compiler of torch before
    2.13 refuses to compare a tensor with a word. Mutates: feat_cache, feat_idx."""
    if feat_cache is not None and feat_idx is not None:
        place = feat_idx[0]
        feat_idx[0] += 1
        kept = feat_cache[place]
        if kept is None:
            feat_cache[place] = "Rep"
        else:
            past = kept if isinstance(kept, Tensor) else torch.zeros_like(x[:, :, -1:])
            newest = x[:, :, -2:]
            both = newest.clone() if newest.shape[2] == 2 else torch.cat([past[:, :, -1:], newest], 2)
            x = self.time_conv(x, past).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
            feat_cache[place] = both
    frames = x.shape[2]
    made: Tensor = self.resample(x.transpose(1, 2).flatten(0, 1))
    pictures: Tensor = made.unflatten(0, (-1, frames)).transpose(1, 2)
    return pictures


class WanAutoencoder:
    """A `VideoAutoencoder`; of a half that was not loaded nothing can be called.

    Frames to encode may come in any numbers. One makes the first latent frame, `temporal` each later one; what does not
    make a whole group waits in the memory for the next call. Latents are the mean of the autoencoder's distribution,
    nothing is drawn.
    """

    first_frames = 1

    def __init__(self, autoencoder: AutoencoderKLWan) -> None:
        config: dict[str, Any] = autoencoder.config
        self.autoencoder = autoencoder
        weights = list(autoencoder.parameters())
        weight = next((each for each in weights if not each.is_meta), weights[0])
        self.device, self.dtype = weight.device, weight.dtype
        self.latent_channels: int = config["z_dim"]
        self.patch_size: int = config["patch_size"] or 1
        self.spatial: int = 2 ** (len(config["dim_mult"]) - 1) * self.patch_size
        self.temporal: int = 2 ** sum(config["temperal_downsample"])
        self.normalisation = Normalisation(config["latents_mean"], config["latents_std"], self.device)
        self.layers: nn.Module = autoencoder.decoder
        self._layout = torch.contiguous_format
        for module in autoencoder.decoder.modules():
            if isinstance(module, WanResample) and module.mode == "upsample3d":
                module.forward = MethodType(_double_frames, module)  # type: ignore[method-assign]

    def new_memory(self) -> WanMemory:
        return WanMemory()

    new_encode_memory = new_memory

    def set_channels_last(self, channels_last: bool) -> None:
        """See `VideoAutoencoder`; as the weights were stored, unless told otherwise."""
        self._layout = torch.channels_last_3d if channels_last else torch.contiguous_format
        for module in self.autoencoder.decoder.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                flat = torch.channels_last if channels_last else torch.contiguous_format
                layout = self._layout if isinstance(module, nn.Conv3d) else flat
                module.weight.data = module.weight.data.contiguous(memory_format=layout)

    def frames_of(self, latents: int) -> int:
        """Frames that a stream's first `latents` latent frames give."""
        return max(0, 1 + (latents - 1) * self.temporal)

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes of a running stream's memory, for latents of `height` x `width`."""
        return self.dtype.itemsize * wan_decoder(self.autoencoder.config, height, width).remembered

    @torch.inference_mode()
    def decode_video(self, latents: Tensor, memory: WanMemory) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` to frames float32 `[B, 3, n, H, W]` in [-1, 1]. Mutates: memory.

        Raises:
            ValueError: latents of another shape than that, or than the stream began with.
        """
        _check("latents", latents, self.latent_channels, memory)
        return self.decode_raw(self.normalisation.undo(latents), memory).float()

    @torch.inference_mode()
    def decode_raw(self, raw: Tensor, memory: WanMemory) -> Tensor:
        """As `decode_video`, for raw latents, in the weights' dtype: `AutoencoderKLWan.decode`, piece by piece.

        Raises:
            ValueError: latents of another shape than that, or than the stream began with.
        """
        past, parts = self.past(raw, memory), []
        for piece in self.pieces(raw, past):
            part, past = self._step(piece, past)
            parts.append(part)
        self.remember(raw, memory, past)
        return torch.cat(parts, 2)

    def past(self, latents: Tensor, memory: WanMemory) -> DecoderState:
        """See `VideoAutoencoder`. A stream's first two latent frames meet three kinds: nothing, then one frame of each
        layer and a word where time is stretched, then two frames, from there on always."""
        _check("latents", latents, self.latent_channels, memory)
        return dict(enumerate(_features(memory, self.autoencoder.decoder)))

    def pieces(self, latents: Tensor, past: DecoderState) -> tuple[Tensor, ...]:
        """A stream's first latent frame, which makes one picture, then all others together."""
        if latents.shape[2] == 1 or not _begins(past):
            return (latents,)
        return latents[:, :, :1], latents[:, :, 1:]

    def step(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        video, after = self._step(self.normalisation.undo(piece), past)
        return (video[0].float().transpose(0, 1) + 1) * 127.5, after

    def remember(self, latents: Tensor, memory: WanMemory, past: DecoderState) -> int:
        memory.features, memory.size = list(past.values()), _check("latents", latents, self.latent_channels, memory)
        return 0

    def _step(self, raw: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        """Raw latents `[B, C, F, h, w]` to frames `[B, 3, n, H, W]` in [-1, 1], in the weights' dtype."""
        features, first = list(past.values()), _begins(past)
        x = self.autoencoder.post_quant_conv(raw.to(self.dtype))
        x = self.autoencoder.decoder(x, feat_cache=features, feat_idx=[0], first_chunk=first)
        video: Tensor = unpatchify(x, self.patch_size)  # type: ignore[no-untyped-call]
        # In a layout that is always the same, as a graph is made for it.
        after = {
            index: each.contiguous(memory_format=self._layout) if isinstance(each, Tensor) else each
            for index, each in enumerate(features)
        }
        return video.clamp(-1, 1), after

    def latents_of(self, frames: int) -> int:
        """Latent frames that a clip of `frames` frames becomes.

        Raises:
            ConfigError: frames would be left over.
        """
        groups, left = divmod(frames - 1, self.temporal)
        if frames < 1 or left:
            step = self.temporal
            near = ", ".join(str(1 + n * step) for n in (groups, groups + 1) if n >= 0)
            raise ConfigError(
                f"{frames} frames cannot be encoded: the Wan autoencoder takes one frame, then groups of {step}; "
                f"the nearest lengths are {near}"
            )
        return 1 + groups

    def encode(self, video: Tensor, memory: WanMemory) -> Tensor:
        """Frames `[B, 3, n, H, W]` in [-1, 1], n at least 1, to normalised latents float32 `[B, C, F, h, w]`; F may be
        0. Mutates: memory.

        Raises:
            ValueError: frames of another shape than that, or than the stream began with; sides that are no multiple of
                `spatial`.
        """
        with torch.inference_mode():
            return self.normalisation.apply(self.encode_raw(video, memory))

    @torch.inference_mode()
    def encode_raw(self, video: Tensor, memory: WanMemory) -> Tensor:
        """As `encode`, but raw latents in the weights' dtype: the mean of `AutoencoderKLWan.encode`, piece by piece."""
        size = batch, height, width = _check("frames", video, 3, memory, self.spatial)
        features, first = _features(memory, self.autoencoder.encoder), 0 if memory.features else 1
        whole, pending = picture_decoder.split_whole(memory.pending, video.to(self.dtype), first, self.temporal)
        whole = patchify(whole, self.patch_size)  # type: ignore[no-untyped-call]
        parts = [
            self.autoencoder.encoder(group, feat_cache=features, feat_idx=[0])
            for group in (*whole[:, :, :first].split(1, 2), *whole[:, :, first:].split(self.temporal, 2))
            if group.shape[2]
        ]
        shape = (batch, self.latent_channels, 0, height // self.spatial, width // self.spatial)
        raw: Tensor = video.new_empty(shape, dtype=self.dtype)
        if parts:
            raw = self.autoencoder.quant_conv(torch.cat(parts, 2))[:, : self.latent_channels]
            memory.features = features
        memory.size, memory.pending = size, pending
        return raw

    def finish(self, memory: WanMemory) -> Tensor | None:
        """End an encoded stream; returns None, as no latent frame is pending.

        Raises:
            ConfigError: frames are left over that make no whole group; diffusers would drop them without a word.
        """
        if memory.pending is not None:
            left = memory.pending.shape[2]
            raise ConfigError(f"{left} frames are left over at the end, but {self.temporal} make a latent frame")
        return None


Half = Literal["decoder", "encoder", "both"]
WAN_CLASS = "AutoencoderKLWan"
WAN_PREFIXES: dict[Half, tuple[str, ...]] = {
    "decoder": ("decoder.", "post_quant_conv."),
    "encoder": ("encoder.", "quant_conv."),
    "both": ("",),
}
_WIDTHS = {
    "base_dim": "encoder.conv_in.weight",
    "decoder_base_dim": "decoder.norm_out.gamma",
    "z_dim": "post_quant_conv.weight",
}
"""Tensors whose rows tell a width."""


def read_wan(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """The tensors in diffusers' names, and the configuration: `config`, or what the shapes tell. `path` is for
    messages.

    Raises:
        ConfigError: original names that are none of the layout; or widths that neither a configuration nor the shapes
            tell.
    """
    if any(_ORIGINAL.fullmatch(name) for name in tensors):  # a name that diffusers does not have
        tensors = {target: tensors[name] for name, target in to_diffusers(tensors).items()}
    return tensors, config or _config_of(path, tensors)


def _config_of(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration of diffusers' class: Wan's, as wide as the tensors, which have diffusers' names."""
    found = {}
    for key, name in _WIDTHS.items():
        if name not in tensors:
            if (what := what_it_holds(tensors)) and "--vae" not in what:
                raise ConfigError(f"{path} is no autoencoder: it holds {what}")
            raise ConfigError(
                f"{path} has no tensor {name}, so its size is unknown; expected the names of Wan2.1_VAE.pth, of "
                "Wan2.2_VAE.pth or of a diffusers AutoencoderKLWan"
            )
        found[key] = tensors[name].shape[0]
    return {**picture_decoder.wan_config(path, found["z_dim"]), **found}


# ---- original names -------------------------------------------------------------------------------------------------

_ORIGINAL = re.compile(r"(?:encoder\.downsamples|decoder\.upsamples|(?:encoder|decoder)\.(?:middle|head))\..*")
_SHORTCUT = re.compile(r"decoder\.up_blocks\.(\d+)\.conv_shortcut\.(weight|bias)")
_NESTED = re.compile(
    r"((?:en|de)coder)\.(down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\."
    r"(residual\.[0236]|shortcut|resample\.1|time_conv)\.(\w+)"
)
"""Of Wan2.2: a level's residual blocks, and behind them what enlarges or shrinks."""
_INSIDE = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2"}
_INSIDE |= {"shortcut": "conv_shortcut"}
_LEVEL = 4
"""Modules of a decoder's level that are counted through: three residual blocks and what enlarges."""


def to_diffusers(names: Iterable[str]) -> dict[str, str]:
    """diffusers' name of each original name, by its own conversion, with the shortcuts that other widths have too.

    Raises:
        ConfigError: lists names that are none of the layout.
    """
    names = list(names)
    nested = {name: _nested(match) for name in names if (match := _NESTED.fullmatch(name))}
    flat = {name: name for name in names if name not in nested}
    try:
        converted = convert_wan_vae_to_diffusers(flat)  # type: ignore[no-untyped-call]
    except (ValueError, IndexError):  # a number is expected in a name
        converted = {}
    found = {name: _SHORTCUT.sub(_in_level, target) for target, name in converted.items()} | nested
    # Left as they are, lost behind another one's name, or nested otherwise.
    unknown = [name for name in names if found.get(name, name) == name or (name in flat and name.count("samples.") > 1)]
    if unknown:
        raise ConfigError(
            f"{len(unknown)} of {len(names)} tensor names are not those of Wan2.1_VAE.pth or Wan2.2_VAE.pth: "
            f"{some(unknown)}"
        )
    return found


def _nested(match: re.Match[str]) -> str:
    """diffusers' name of a tensor in a level of Wan2.2's."""
    half, way, level, place, module, leaf = match.groups()
    inner = f"resnets.{place}.{_INSIDE[module]}" if module in _INSIDE else f"{way}sampler.{module}"
    return f"{half}.{way}_blocks.{level}.{inner}.{leaf}"


def _in_level(shortcut: re.Match[str]) -> str:
    level, place = divmod(int(shortcut[1]), _LEVEL)
    return f"decoder.up_blocks.{level}.resnets.{place}.conv_shortcut.{shortcut[2]}"
