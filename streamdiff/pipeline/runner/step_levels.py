"""Timesteps and noise levels given by chunk and latent frame, in place of the schedule's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.session_state.fields import session_value


@session_value("step-levels")
@dataclass(frozen=True)
class StepLevels:
    """What the first `steps` denoise steps of every chunk have instead of the schedule's levels; later steps and the
    clean pass have the schedule's. Chunks beyond n have the last one's. F latent frames of a chunk.

    timesteps: what the model is told, 0 to 1000, float32 `[n, steps, F]`.
    sigmas: noise levels that x0 and x_t are made with, 0 to 1, float32 `[n, steps, F]`.
    """

    timesteps: Tensor
    sigmas: Tensor

    def starting_at(self, chunk: int) -> StepLevels:
        """Those of a stream whose chunk 0 is `chunk` here."""
        return StepLevels(self.timesteps[chunk:], self.sigmas[chunk:])

    def to(self, device: torch.device) -> StepLevels:
        return StepLevels(self.timesteps.to(device), self.sigmas.to(device))

    def timestep(self, chunk: int, step: int) -> Tensor | None:
        """Of each latent frame `[F]`; None: the schedule's."""
        return self._at(self.timesteps, chunk, step)

    def sigma(self, chunk: int, step: int) -> Tensor | None:
        """Of each latent frame `[F, 1, 1]`, which goes with latents `[C, F, h, w]`; None: the schedule's."""
        found = self._at(self.sigmas, chunk, step)
        return None if found is None else found[:, None, None]

    @staticmethod
    def _at(values: Tensor, chunk: int, step: int) -> Tensor | None:
        return values[min(chunk, len(values) - 1), step] if step < values.shape[1] else None
