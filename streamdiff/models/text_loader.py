"""Loads the text encoder of a model that `models.resolve` has found."""

from __future__ import annotations

from pathlib import Path

import torch

from streamdiff.config import ModelConfig
from streamdiff.device import pick_device
from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import entries
from streamdiff.models.catalogue.schema import Files
from streamdiff.models.checkpoint import hub
from streamdiff.models.interfaces import TextEncoder
from streamdiff.models.random_weights import RandomText
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.text_encoder import wan_files
from streamdiff.models.text_encoder.embedding_cache import CachedText, EmbeddingCache
from streamdiff.models.text_encoder.embedding_store import EmbeddingFolder
from streamdiff.models.text_encoder.wan import WanText
from streamdiff.models.tiny.text_encoder import TinyText

_CACHE_BYTES = 256 * 2**20  # some sixty prompts of 512 x 4096 in bfloat16


def load_text_encoder(
    model: ResolvedModel, config: ModelConfig, text_shape: tuple[int, int], device: torch.device
) -> TextEncoder:
    """The text encoder, which puts embeddings of `text_shape` on `device`. That of a large model runs on the configured
    `text_device`, else see `WanText`. Its weights come with the first text, and go after every text unless they are to
    be kept. Embeddings of a large one are kept in the user's cache folder too (`EmbeddingFolder`), unless the
    configuration says no.

    Raises:
        ConfigError: there is none, or `text_device` is no device that there is, or the model is a small one.
    """
    if model.index is not None:
        if config.text_device is not None:
            raise ConfigError(f"the text encoder of {model.name} is small and runs beside it; leave --text-device out")
        assert model.folder is not None
        return TinyText.load(model.folder, device)
    if (path := model.text_encoder) is None:
        if model.name.startswith(entries.RANDOM):
            return RandomText(text_shape, device)
        raise ConfigError(
            f"{model.name} comes without a text encoder; give a folder with encoder and tokenizer, in diffusers' or "
            "original Wan's layout, as --text-encoder, or embeddings as --prompt-embeds"
        )
    if isinstance(path, Files):
        path = hub.fetch_folder(path)
    home = None if config.text_device is None else pick_device(config.text_device, "--text-device")
    length, width = text_shape
    encoder = WanText(path, length=length, width=width, device=home, output=device, keep=config.keep_text_encoder)
    return CachedText(encoder, EmbeddingCache(_CACHE_BYTES), EmbeddingFolder() if config.keep_embeddings else None)


def awaited_bytes(text: TextEncoder, device: torch.device) -> int:
    """Bytes that a text encoder's weights will take on `device` once the first text loads them."""
    return text.encoder.awaited_bytes(device) if isinstance(text, CachedText) else 0


def expected_bytes(model: ResolvedModel) -> int:
    """Bytes of the text encoder's weights in bfloat16, known before it is loaded or fetched: from its headers where it
    is given, else from the catalogue; 0 where there is none."""
    if isinstance(model.text_encoder, Path):
        return 2 * wan_files.find(model.text_encoder).values
    if model.entry is None or model.text_encoder is None:
        return 0
    return round(1e9 * (entries.parts().text_encoders[model.entry.text_encoder].gigabytes or 0))
