"""Any autoencoder that is there, by its path: which kind it is, and its two halves behind one interface each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from streamdiff.config import EMBEDDED
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder import wan_weights
from streamdiff.models.autoencoder.normalisation import Normalisation
from streamdiff.models.autoencoder.stepped_decoder import VideoDecoder
from streamdiff.models.autoencoder.taehv_codec import (
    StreamingTaehv,
    TaehvDecoder,
    TaehvEncoder,
    from_tensors,
    is_taehv,
    load_folder,
    space_of,
)
from streamdiff.models.autoencoder.wan import WanDecoder, WanEncoder
from streamdiff.models.catalogue import entries
from streamdiff.models.checkpoint import hub
from streamdiff.models.checkpoint.checkpoint import read_tensors
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.transformer.weights import FILE

WAN_FPS = 16.0


class VideoEncoder(Protocol):
    """Frames to latents, in any pieces: encoding a stream in pieces gives the latents of encoding it whole. Sizes and
    `normalisation` are as of `VideoDecoder`."""

    latent_channels: int
    spatial: int
    temporal: int
    device: torch.device

    @property
    def normalisation(self) -> Normalisation | None: ...

    def new_memory(self) -> Any:
        """The memory of a stream that has not begun."""

    def latents_of(self, frames: int) -> int:
        """Latent frames that a clip becomes; ConfigError for a length that cannot be encoded."""

    def encode(self, video: Tensor, memory: Any) -> Tensor:
        """Frames `[B, 3, n, H, W]` in [-1, 1] to normalised latents float32 `[B, C, F, h, w]`, F 0 or more; frames
        that do not make a latent frame yet wait in the memory. Mutates: memory."""

    def finish(self, memory: Any) -> Tensor | None:
        """At a stream's end: latents of frames that wait, None if there are none. Mutates: memory."""


def load_decoder(
    path: str | Path, device: torch.device, dtype: torch.dtype = torch.float32, latent_space: str | None = None
) -> VideoDecoder:
    """The decoder half of the autoencoder at `path`.

    Args:
        path: `tiny`, the embedded model's; a published one's name (`catalogue.autoencoders`), which is fetched if it is
            not there; a folder with `config.json` and weights, or one that has it in `vae/`; or a
            .safetensors or .pth file: `Wan2.1_VAE.pth`, `taew2_1.pth` and their like.
        latent_space: for TAEHV files, `normalised` or `raw`; None: by the file's published name.

    Raises:
        ConfigError: nothing there, nothing known, or weights that do not fit (listed).
    """
    model = _load(path, "decoder", device, dtype, latent_space)
    return TaehvDecoder(model) if isinstance(model, StreamingTaehv) else WanDecoder(model)


def load_encoder(
    path: str | Path, device: torch.device, dtype: torch.dtype = torch.float32, latent_space: str | None = None
) -> VideoEncoder:
    """The encoder half of the autoencoder at `path`; as `load_decoder`."""
    model = _load(path, "encoder", device, dtype, latent_space)
    return TaehvEncoder(model) if isinstance(model, StreamingTaehv) else WanEncoder(model)


def normalisation(half: VideoDecoder | VideoEncoder, path: str | Path) -> Normalisation:
    """What leads from raw latents to normalised ones with a half of the autoencoder at `path`.

    Raises:
        ConfigError: it knows normalised ones alone.
    """
    if half.normalisation is None:
        raise ConfigError(
            f"{path} knows normalised latents alone, so it neither makes nor takes raw ones; use Wan's own autoencoder"
        )
    return half.normalisation


def native_fps(path: str | Path) -> float:
    """Frames per second at which a video of this autoencoder's model moves as intended; Wan's where nothing says."""
    index = locate(path).parent / "model_index.json"
    tree = read_object(index) if index.is_file() else {}
    return float(tree.get("stream", {}).get("native_fps", WAN_FPS))


def names() -> list[str]:
    """Of autoencoders that need no path."""
    return [EMBEDDED, *entries.autoencoders()]


def locate(path: str | Path) -> Path:
    """The folder that has the autoencoder's config.json, or its file, which is fetched if it is published by this name;
    need not be there.

    Raises:
        ConfigError: a published one that cannot be fetched.
    """
    given = EMBEDDED_WEIGHTS if str(path) == EMBEDDED else Path(path)
    if not given.exists() and (files := entries.autoencoders().get(str(path))) is not None:
        return hub.fetch(files)[0]
    if given.is_dir() and not (given / "config.json").is_file() and (given / "vae").is_dir():
        return given / "vae"
    return given


def _load(
    path: str | Path, half: wan_weights.Half, device: torch.device, dtype: torch.dtype, latent_space: str | None
) -> StreamingTaehv | Any:
    place = locate(path)
    if not place.exists():
        raise ConfigError(
            f"there is no autoencoder at {place}; it can be {', '.join(names())}, a folder with config.json and "
            f"{FILE}, or a .safetensors or .pth file"
        )
    if place.is_dir():
        _refuse_space(place, latent_space)
        return _load_folder(place, half, device, dtype)
    tensors = read_tensors(place)
    if is_taehv(tensors):
        return from_tensors(place, tensors, space_of(place, latent_space), device, dtype)
    _refuse_space(place, latent_space)
    return wan_weights.load(place, half, device, dtype, tensors)


def _refuse_space(place: Path, latent_space: str | None) -> None:
    if latent_space is not None:
        raise ConfigError(f"--latent-space is for TAEHV files; {place} says itself which latents it takes")


def _load_folder(
    folder: Path, half: wan_weights.Half, device: torch.device, dtype: torch.dtype
) -> StreamingTaehv | Any:
    if wan_weights.read_config(folder / "config.json") is not None:
        return wan_weights.load(folder, half, device, dtype)
    path = folder / "config.json"
    stored = read_object(path) if path.is_file() else {}
    if stored.get("_class_name") != "TAEHV":
        held = f"_class_name {stored.get('_class_name')!r}" if stored else "nothing"
        raise ConfigError(f"{path} says {held}; an autoencoder's says {wan_weights.CLASS} or TAEHV")
    return load_folder(folder, device, dtype)
