"""A stage: a run of transformer blocks with the caches of those blocks, for every open session.

Does what works say; never decides anything itself. Knows nothing about latents' noise or about sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamdiff.models.base import ModelSpec, Trunk
from streamdiff.models.wan.transformer import KeyValue, Tokens
from streamdiff.pipeline.microstep import MicroStep
from streamdiff.pipeline.scheduler import cache_count, spare_slots
from streamdiff.pipeline.work import Kind, Work
from streamdiff.state.ring import RingAttention, RingPlan, RowView, StageState


@dataclass
class StageSession:
    """What the stage keeps of a session: its ring, its steps per chunk (the first one's left aside), and of each epoch
    still in use the cross-attention keys, and the chunk before which its chunks see nothing but the sink."""

    plan: RingPlan
    state: StageState
    steps: int
    matched: bool
    text: dict[int, list[KeyValue]] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)


class Stage:
    """Stage `index` of `stages`: the blocks of `model.denoiser`, which are its own only. The last one has the output
    layer too."""

    def __init__(self, model: Trunk, device: torch.device, index: int = 0, stages: int = 1) -> None:
        self.denoiser, self.spec, self.device = model.denoiser, model.spec, device
        self.index, self.stages = index, stages
        spec, patch = model.spec, model.denoiser.patch
        if patch[0] != 1:
            raise ValueError(f"a patch has {patch[0]} latent frames; it must have 1, as windows count latent frames")
        self.frames = spec.chunk_latents
        self.grid = (spec.latent_height // patch[1], spec.latent_width // patch[2])
        self.attention = RingAttention(self.frames, *self.grid, self.denoiser.head_dim, device)
        self.sessions: dict[int, StageSession] = {}

    @torch.inference_mode()
    def carry_out(self, work: Work) -> Work:
        """Do what `work` says; returns what the next rank gets. Mutates: self."""
        control = work.control
        if control is None:
            tokens = self.forward(work.rows, Tokens(*work.tensors))
            if self.index < self.stages - 1:
                return Work(work.kind, work.rows, None, tuple(tokens))
            return Work(work.kind, work.rows, None, (self.denoiser.head(tokens, self.spec.chunk_shape[1:]),))
        match work.kind:
            case Kind.OPEN:
                self.open(control.session, steps=control.steps, kv_context=control.kv_context)
            case Kind.TEXT:
                self.set_text(control.session, control.epoch, work.tensors[0], control.oldest, control.since)
            case Kind.RESET:
                self.reset(control.session)
            case Kind.CLOSE:
                self.close(control.session)
        return work

    @torch.inference_mode()
    def open(self, session: int, *, steps: int, kv_context: str) -> None:
        """Allocate the session's caches. Mutates: self."""
        plan = ring_plan(self.spec, kv_context, steps=steps)
        state = StageState.allocate(
            plan,
            caches=cache_count(kv_context, steps=steps),
            layers=len(self.denoiser.blocks),
            tokens=self.frames * self.grid[0] * self.grid[1],
            heads=self.denoiser.heads,
            head_dim=self.denoiser.head_dim,
            like=torch.empty(0, dtype=self.denoiser.dtype, device=self.device),  # weights may be quantised
        )
        self.sessions[session] = StageSession(plan, state, steps, kv_context == "matched")

    def close(self, session: int) -> None:
        """Free the session. Mutates: self."""
        self.sessions.pop(session, None)

    @torch.inference_mode()
    def reset(self, session: int) -> None:
        """Empty the session's caches. Mutates: self."""
        self.sessions[session].state.reset()
        self.sessions[session].text.clear()
        self.sessions[session].since.clear()

    @torch.inference_mode()
    def set_text(self, session: int, epoch: int, embeddings: Tensor, oldest: int, since: int = 0) -> None:
        """Project text embeddings `[T, text_dim]` for `epoch`, whose chunks see none before `since` but the sink;
        epochs before `oldest` are forgotten. Mutates: self."""
        kept = self.sessions[session]
        kept.text[epoch] = self.denoiser.text(embeddings[None].to(self.device, self.denoiser.dtype))
        kept.since[epoch] = since
        for epoch_gone in [e for e in kept.text if e < oldest]:
            del kept.text[epoch_gone], kept.since[epoch_gone]

    @torch.inference_mode()
    def forward(self, rows: Sequence[MicroStep], tokens: Tokens) -> Tokens:
        """Run this stage's blocks for `rows`. Mutates: the rows' caches."""
        views = [self._view(row) for row in rows]
        texts = [self.sessions[row.session].text[row.epoch] for row in rows]
        return self.denoiser.run_blocks(tokens, _side_by_side(texts), self.attention.on(views))

    def _view(self, row: MicroStep) -> RowView:
        session = self.sessions[row.session]
        # A first chunk may have more steps: those before the others' first write where that one will.
        cache = max(0, row.step - (row.steps - session.steps)) if session.matched else 0
        # Where there is a clean pass, only what that writes stays.
        adapt = self.spec.adaptive_sink if session.matched or row.clean else None
        # A chunk leaves when the one that takes its slot first writes there.
        fold = self.spec.averaged_sink if session.matched or row.step == 0 else None
        since = session.since[row.epoch]
        return self.attention.view(session.plan, session.state, cache, row.chunk, since, adapt, fold)


def ring_plan(spec: ModelSpec, kv_context: str, *, steps: int) -> RingPlan:
    """The geometry of a session's caches, the same on every stage."""
    spare, absolute = spare_slots(kv_context, steps=steps), spec.rope == "absolute"
    return RingPlan(spec.sink_latents, spec.window(kv_context), spare, absolute, spec.chunk_latents)


def _side_by_side(texts: Sequence[list[KeyValue]]) -> list[KeyValue]:
    """Text keys and values of several rows, layer by layer; those of one row as they are, without a copy."""
    if len(texts) == 1:
        return texts[0]
    return [KeyValue(*(torch.cat(parts) for parts in zip(*layer, strict=True))) for layer in zip(*texts, strict=True)]
