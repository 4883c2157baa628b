"""A Wan model from its parts on disk: facts that nobody has published are given, the others are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import Checkpoint
from streamdiff.models.wan.lora import Lora
from streamdiff.models.wan.transformer import WanDenoiser
from streamdiff.models.wan.weights import load_transformer

SPATIAL, TEMPORAL = 8, 4
"""Pixels per latent pixel each way and frames per latent frame of Wan2.1's autoencoder, and of its small ones."""


@dataclass(frozen=True)
class TransformerSource:
    """Where a transformer's weights come from; see `load_transformer`."""

    weights: Path | Checkpoint
    container: str | None = None
    config: Mapping[str, Any] | None = None
    loras: tuple[Lora, ...] = ()


def load_denoiser(
    source: TransformerSource,
    device: torch.device,
    dtype: torch.dtype,
    blocks: tuple[int, int] | None = None,
    quantize: str = "none",
) -> WanDenoiser:
    """The transformer, or blocks `blocks` (first, last exclusive) of it, quantised as `models.quantize` has it.

    Raises:
        ConfigError: see `load_transformer`; or one that is told more than latents and text (image to video), which
            nothing here gives it.
    """
    model = load_transformer(
        source.weights,
        device=device,
        dtype=dtype,
        blocks=blocks,
        container=source.container,
        config=source.config,
        loras=source.loras,
        quantize=quantize,
    )
    told: Any = model.config
    if told.image_dim is not None or told.added_kv_proj_dim is not None:
        raise ConfigError(
            f"{source.weights}: this is an image-to-video model, which is not supported; use text to video"
        )
    return WanDenoiser(model)
