"""Loads the text encoder of a model that `models.resolve` has found."""

from __future__ import annotations

import torch

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import entries
from streamdiff.models.catalogue.schema import Files
from streamdiff.models.checkpoint import hub
from streamdiff.models.interfaces import TextEncoder
from streamdiff.models.random_weights import RandomText
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.text_encoder.embedding_cache import CachedText, EmbeddingCache
from streamdiff.models.text_encoder.embedding_store import EmbeddingFolder
from streamdiff.models.text_encoder.wan import WanText
from streamdiff.models.tiny.text_encoder import TinyText

_CACHE_BYTES = 256 * 2**20  # some sixty prompts of 512 x 4096 in bfloat16


def load_text_encoder(
    model: ResolvedModel, config: ModelConfig, text_shape: tuple[int, int], device: torch.device
) -> TextEncoder:
    """The text encoder, which puts embeddings of `text_shape` on `device`. Where that of a large model
    runs: see `WanText`. Its weights come with the first text. Embeddings of a large one are kept in the user's cache
    folder too (`EmbeddingFolder`).

    Raises:
        ConfigError: there is none.
    """
    if model.index is not None:
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
    length, width = text_shape
    encoder = WanText(path, length=length, width=width, output=device)
    return CachedText(encoder, EmbeddingCache(_CACHE_BYTES), EmbeddingFolder())


def awaited_bytes(text: TextEncoder, device: torch.device) -> int:
    """Bytes that a text encoder's weights will take on `device` once the first text loads them."""
    return text.encoder.awaited_bytes(device) if isinstance(text, CachedText) else 0
