"""A stage: a run of transformer blocks with the caches of those blocks, for every open session.

Does what micro-steps say; never decides anything itself. Knows nothing about latents' noise or about sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamdiff.models.base import Model
from streamdiff.models.wan.transformer import KeyValue, Tokens
from streamdiff.pipeline.microstep import MicroStep
from streamdiff.pipeline.scheduler import in_flight_limit
from streamdiff.state.ring import RingAttention, RingPlan, RowView, StageState


@dataclass
class StageSession:
    """What the stage keeps of a session: its ring, and cross-attention keys of each epoch still in use."""

    plan: RingPlan
    state: StageState
    matched: bool
    text: dict[int, list[KeyValue]] = field(default_factory=dict)


class Stage:
    """Blocks `first` to `last` (exclusive) of the model; with all of them, the whole transformer."""

    def __init__(self, model: Model, first: int, last: int, device: torch.device) -> None:
        self.denoiser, self.spec = model.denoiser, model.spec
        self.first, self.last, self.device = first, last, device
        spec, patch = model.spec, model.denoiser.patch
        self.frames = spec.chunk_latents // patch[0]
        self.grid = (spec.latent_height // patch[1], spec.latent_width // patch[2])
        self.attention = RingAttention(self.frames, *self.grid, self.denoiser.head_dim, device)
        self.sessions: dict[int, StageSession] = {}

    @torch.inference_mode()
    def open(self, session: int, *, steps: int, kv_context: str, stages: int) -> None:
        """Allocate the session's caches. Mutates: self."""
        spec = self.spec
        spare = in_flight_limit(kv_context, steps=steps, stages=stages) - 1
        plan = RingPlan(spec.sink_latents // spec.chunk_latents, spec.window_chunks(kv_context), spare)
        state = StageState.allocate(
            plan,
            caches=steps if kv_context == "matched" else 1,
            layers=self.last - self.first,
            tokens=self.frames * self.grid[0] * self.grid[1],
            heads=self.denoiser.heads,
            head_dim=self.denoiser.head_dim,
            like=self.denoiser.blocks[self.first].scale_shift_table.detach(),
        )
        self.sessions[session] = StageSession(plan, state, kv_context == "matched")

    def close(self, session: int) -> None:
        """Free the session. Mutates: self."""
        self.sessions.pop(session, None)

    @torch.inference_mode()
    def reset(self, session: int) -> None:
        """Empty the session's caches. Mutates: self."""
        self.sessions[session].state.reset()
        self.sessions[session].text.clear()

    @torch.inference_mode()
    def set_text(self, session: int, epoch: int, embeddings: Tensor, oldest: int) -> None:
        """Project text embeddings `[T, text_dim]` for `epoch`; epochs before `oldest` are forgotten. Mutates: self."""
        text = self.sessions[session].text
        text[epoch] = self.denoiser.text(embeddings[None].to(self.device))
        for epoch_gone in [e for e in text if e < oldest]:
            del text[epoch_gone]

    @torch.inference_mode()
    def forward(self, rows: list[MicroStep], tokens: Tokens) -> Tokens:
        """Run this stage's blocks for `rows`. Mutates: the rows' caches."""
        views = [self._view(row) for row in rows]
        texts = [self.sessions[row.session].text[row.epoch] for row in rows]
        text = [
            KeyValue(*(torch.cat(parts) for parts in zip(*layer, strict=True))) for layer in zip(*texts, strict=True)
        ]
        attention = self.attention.on(views, self.first)
        return self.denoiser.run_blocks(self.first, self.last, tokens, text, attention)

    def _view(self, row: MicroStep) -> RowView:
        session = self.sessions[row.session]
        cache = row.step if session.matched else 0
        return self.attention.view(session.plan, session.state, cache, row.chunk)
