"""Precomputed features (prompt embeddings, latents, motion) as tensors for a pipeline's sessions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.models.model import Model
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.runner.init_latents import LOWEST, GivenVideo, motion_levels


class FeaturesMixin:
    """`StreamingPipeline`'s methods that convert features. For any thread; their shapes have been checked."""

    model: Model
    ring: RingExecutor

    def conditioning_of(self, rows: NDArray[np.float32]) -> Tensor:
        """Prompt embeddings `[L, D]`, padded with zero rows to `[T, D]` as the text encoder pads them."""
        embeddings = torch.zeros(self.model.spec.text_shape)
        embeddings[: len(rows)] = torch.from_numpy(np.array(rows))
        return embeddings

    def start_of(self, latents: NDArray[np.float32]) -> Tensor:
        """Latents `[n, C, F, h, w]` of a stream's first chunks."""
        return torch.from_numpy(np.array(latents))

    def video_of(self, latents: NDArray[np.float32], strength: float, motion: NDArray[np.float64] | None) -> GivenVideo:
        """Video that chunks start from, latents `[n, C, F, h, w]`. The more it moves, the less noise, as live video has
        it; `motion` `[n]` is that of its pixels, None: that of the latents counts."""
        video = torch.from_numpy(np.array(latents))
        moves = None if motion is None else torch.from_numpy(motion)
        levels = motion_levels(video, strength, self.model.spec.first_chunks, moves).clamp(LOWEST, 1)
        return GivenVideo(video, tuple(levels.tolist())).on(self.ring.sampler.device)
