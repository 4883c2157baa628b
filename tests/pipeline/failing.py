"""Sessions that fail in one of the ways in which one alone can, and how tests play them beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streamdiff.core import MicroStep
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.graphs import Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.small import BLUE, RED, WHITE

AT = (2, 1)
"""Chunk and step of the failure."""
CHUNKS = 4
KINDS = {"numbers": "NaN", "midway": "ArithmeticError: too hot", "text": "KeyError: 0", "open": "OutOfMemoryError"}
"""What a session's end is told to be, by the way in which it fails."""
ONCE = "numbers once"


def spoil(stage: ModelRunner, session: int, kind: str) -> None:
    """Have a session fail on this stage. Mutates: stage."""
    forward, apply_update = stage.forward, stage.apply_update
    struck: list[int] = []

    def failing_forward(rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        hit = [index for index, row in enumerate(rows) if (row.session, row.chunk, row.step) == (session, *AT)]
        if hit and kind == "text":
            stage.sessions[session].text.clear()
        if hit and kind == "midway":  # other rows have written their keys in the first block
            stage.attention.attend = raise_at_second(stage, stage.attention.attend, len(rows))
        done = forward(rows, given)
        if hit and (kind == "numbers" or (kind == ONCE and not struck)):
            struck.append(1)
            done = tuple(tensor.clone() for tensor in done)
            done[0][hit[0], ..., 0] = torch.inf
        return done

    def failing_update(kind_of: MessageKind, update: SessionUpdate, tensors: Tensors) -> SessionUpdate:
        if (kind, kind_of, update.session) == ("open", MessageKind.OPEN, session):
            raise torch.OutOfMemoryError("no memory for these caches")
        return apply_update(kind_of, update, tensors)

    stage.forward, stage.apply_update = failing_forward, failing_update  # type: ignore[method-assign]


def raise_at_second(stage: ModelRunner, attend: Callable[..., Tensor], rows: int) -> Callable[..., Tensor]:
    """The kernel of a stage, which works for one block and then raises, once. The stage has its own back then."""
    calls: list[int] = []

    def failing(*arguments: object) -> Tensor:
        calls.append(1)
        if len(calls) > rows or len(stage.denoiser.blocks) == 1:
            stage.attention.attend = attend
            raise ArithmeticError("too hot")
        return attend(*arguments)

    return failing


def play_failing(
    ring: Ring, model: Model, contexts: dict[int, str], chunks: int = CHUNKS
) -> tuple[dict[int, list[Tensor]], dict[int, str]]:
    """Latents of so many chunks of every session, of those that fail as many as there are; and why these failed."""
    lost: dict[int, str] = {}
    ring.faults.on_fault = lost.__setitem__
    done: dict[int, list[Tensor]] = {name: [] for name in contexts}
    for name, kv_context in contexts.items():
        text = model.text.encode((RED, BLUE, WHITE)[name % 3])
        ring.open(name, text, seed=name, epoch=0, steps=2 + 2 * (name % 2), kv_context=kv_context)
        ring.scheduler.set_frame_credit(name, (chunks + 6) * model.spec.chunk_frames)
    closed: set[int] = set()
    while any(len(latents) < chunks for name, latents in done.items() if name not in lost):
        assert ring.has_work, "the ring stands still"
        for row, latents in ring.step_latents(1.0)[1]:
            done[row.session].append(latents.clone())
        for name in set(lost) - closed:
            closed.add(name)
            ring.close_session(name)
    return {name: latents[:chunks] for name, latents in done.items()}, lost
