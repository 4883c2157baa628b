"""The loop of a rank: one micro-step at a time through head, stage and back.

With one stage the ring has no links; the hidden states of a forward are simply the next thing the head sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.base import Model
from streamdiff.pipeline.head import Head
from streamdiff.pipeline.microstep import MicroStep
from streamdiff.pipeline.scheduler import StreamBatchScheduler
from streamdiff.pipeline.stage import Stage


class Finished(NamedTuple):
    """A chunk whose latents `[C, F, h, w]` are done."""

    row: MicroStep
    latents: Tensor


class Worker:
    """Scheduler, head and the one stage of this rank."""

    def __init__(self, model: Model, device: torch.device, max_rows: int = 1) -> None:
        self.scheduler = StreamBatchScheduler(stages=1, chunk_frames=model.spec.chunk_frames, max_rows=max_rows)
        self.head = Head(model, device)
        self.stage = Stage(model, 0, len(model.denoiser.blocks), device)

    def turn(self) -> tuple[list[MicroStep], list[Finished]]:
        """Run what the scheduler hands out: the rows that ran (none when nothing is ready), the finished chunks."""
        rows = self.scheduler.next()
        if not rows:
            return [], []
        tokens = self.head.embed(rows)
        tokens = self.stage.forward(rows, tokens)
        finished = [Finished(*item) for item in self.head.advance(rows, tokens)]
        for row in rows:
            self.scheduler.returned(row)
        for done in finished:
            if self.stage.sessions[done.row.session].matched:
                self.head.forget(done.row.session, done.row.chunk)
        return rows, finished

    def open(self, session: int, embeddings: Tensor, *, seed: int, epoch: int, steps: int, kv_context: str) -> None:
        """Open a session on scheduler, head and stage; ValueError on bad values. Mutates: self."""
        self.scheduler.open(session, steps=steps, kv_context=kv_context, epoch=epoch)
        self.head.open(session, seed=seed, steps=steps)
        self.stage.open(session, steps=steps, kv_context=kv_context, stages=self.scheduler.stages)
        self.stage.set_text(session, epoch, embeddings, oldest=epoch)

    def set_text(self, session: int, epoch: int, embeddings: Tensor) -> None:
        """Chunks admitted from now on use these embeddings. Mutates: self."""
        self.stage.set_text(session, epoch, embeddings, oldest=self.scheduler.oldest_epoch(session))
        self.scheduler.set_epoch(session, epoch)

    def reset(self, session: int, embeddings: Tensor, *, seed: int, epoch: int) -> None:
        """Drop what is in flight and start afresh at chunk 0. Mutates: self."""
        self.scheduler.reset(session, epoch)
        self.head.open(session, seed=seed, steps=len(self.head.sessions[session].sigmas))
        self.stage.reset(session)
        self.stage.set_text(session, epoch, embeddings, oldest=epoch)

    def close(self, session: int) -> None:
        """Free a session everywhere. Mutates: self."""
        self.scheduler.close(session)
        self.head.close(session)
        self.stage.close(session)
