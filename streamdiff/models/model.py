"""A loaded model: its facts and the parts that a stage, or rank 0, needs of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, VideoAutoencoder
from streamdiff.models.spec import ModelSpec, TextEncoder
from streamdiff.models.transformer.wan import WanDenoiser


@dataclass(frozen=True)
class StageModel:
    """The part of a model on one stage: its spec, and consecutive transformer blocks on one device."""

    spec: ModelSpec
    denoiser: WanDenoiser


@dataclass(frozen=True)
class Model(StageModel):
    """The part of a model on rank 0: that of a stage, text encoder and decoder. With one stage it is the whole model.
    `text` is None where embeddings are given, `decoder` where another rank decodes, `first_frame_reencoder` where the
    clean pass gets latents as they are."""

    text: TextEncoder | None
    decoder: PictureDecoder | None
    first_frame_reencoder: VideoAutoencoder | None = None

    @property
    def blocks(self) -> int:
        """Transformer blocks of `denoiser`."""
        return len(self.denoiser.blocks)

    def part(self, first: int, last: int) -> Model:
        """The same model with blocks `first` to `last` (exclusive) only."""
        return replace(self, denoiser=self.denoiser.part(first, last))
