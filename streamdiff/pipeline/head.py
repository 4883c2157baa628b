"""The head: owns the latents. Makes the model's input of a micro-step and turns its flow into the next latents.

Only the head knows noise levels and x_t; stages see hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.base import Model
from streamdiff.models.wan.transformer import Tokens
from streamdiff.pipeline.microstep import MicroStep


@dataclass
class HeadSession:
    """Noise source, schedule and the latents `[C, F, h, w]` of chunks in flight (x_t, or x0 for the clean pass)."""

    seed: int
    sigmas: tuple[float, ...]
    latents: dict[int, Tensor] = field(default_factory=dict)


class Head:
    """Embedding, output layer and sampler of every open session."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.denoiser, self.spec, self.device = model.denoiser, model.spec, device
        self.sessions: dict[int, HeadSession] = {}

    def open(self, session: int, *, seed: int, steps: int) -> None:
        """Start a stream, or start it again with another seed. Mutates: self."""
        self.sessions[session] = HeadSession(seed, sampling.schedule(steps, self.spec.shift))

    def close(self, session: int) -> None:
        self.sessions.pop(session, None)

    @torch.inference_mode()
    def embed(self, rows: list[MicroStep]) -> Tokens:
        """Input tokens of `rows`; a chunk's first step draws its noise. Mutates: self."""
        latents, levels = [], []
        for row in rows:
            session = self.sessions[row.session]
            if row.step == 0:
                session.latents[row.chunk] = self._noise(session.seed, row.chunk, 0)
            latents.append(session.latents[row.chunk])
            levels.append(0.0 if row.clean else session.sigmas[row.step])
        timestep = torch.tensor(levels, device=self.device) * sampling.TIMESTEPS
        return self.denoiser.embed(torch.stack(latents), timestep[:, None].expand(-1, self.spec.chunk_latents))

    @torch.inference_mode()
    def advance(self, rows: list[MicroStep], tokens: Tokens) -> list[tuple[MicroStep, Tensor]]:
        """Apply the sampler to what came back; returns finished chunks as (row, x0 `[C, F, h, w]`). Mutates: self."""
        finished = []
        flows = self.denoiser.head(tokens, self.spec.chunk_shape[1:])
        for row, flow in zip(rows, flows, strict=True):
            session = self.sessions[row.session]
            if row.clean:
                del session.latents[row.chunk]
                continue
            x0 = sampling.clean_from_flow(session.latents[row.chunk], flow, session.sigmas[row.step])
            if row.last:
                finished.append((row, x0))
                session.latents[row.chunk] = x0
            else:
                fresh = self._noise(session.seed, row.chunk, row.step + 1)
                session.latents[row.chunk] = sampling.add_noise(x0, fresh, session.sigmas[row.step + 1])
        return finished

    def forget(self, session: int, chunk: int) -> None:
        """Drop a chunk's latents where no clean pass follows (`matched`). Mutates: self."""
        self.sessions[session].latents.pop(chunk, None)

    def _noise(self, seed: int, chunk: int, step: int) -> Tensor:
        return sampling.noise(self.spec.chunk_shape, seed=seed, chunk=chunk, step=step).to(self.device)
