"""Gathers a session's state from all ranks into a snapshot, and scatters one back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import memory_outlines
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.state_exchange import State, stage_key, ticket_key
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.output import StreamProgress
from streamdiff.pipeline.runner.model_runner import RunnerSession
from streamdiff.pipeline.runner.sampler import PendingSteps
from streamdiff.pipeline.snapshot.checks import (
    HeadState,
    Opened,
    check_content,
    check_memory,
    check_session,
)
from streamdiff.pipeline.snapshot.file import LOOSE, Snapshot, model_facts
from streamdiff.session_state import walk


@dataclass(frozen=True)
class StageStates:
    """The stages' states of a session, in host memory: by stage, first to last, one for each rank that shares it; and
    digests of the weights of all blocks."""

    parts: Sequence[Sequence[RunnerSession]]
    weights: Sequence[str]

    @staticmethod
    def are_there(ring: RingExecutor, ticket: int) -> bool:
        """Whether all states that `MessageKind.SAVE` puts into the ring's exchange are there."""
        return all(ring.stage.exchange.holds(key) for keys in _keys(ring, ticket) for key in keys)

    @classmethod
    def take(cls, ring: RingExecutor, ticket: int) -> StageStates:
        """Take these states. Raises ConfigError where a stage has no such session: opening it failed there, or it has
        ended or begun afresh."""
        taken = [[ring.stage.exchange.take(key) for key in keys] for keys in _keys(ring, ticket)]
        broken = [tree["broken"] for there in taken for _, tree in there if "broken" in tree]
        if broken:
            raise ConfigError(broken[0])
        parts = [[walk.restored(tensors, tree["state"]) for tensors, tree in there] for there in taken]
        return cls(parts, [digest for there in taken for digest in there[0][1]["weights"]])

    @property
    def merged(self) -> RunnerSession:
        """One state with all layers and heads."""
        return walk.joined([walk.with_all_heads(shares) for shares in self.parts])

    @property
    def merged_outline(self) -> RunnerSession:
        """The same without content."""
        return StageStates([[walk.to_device(each, walk.META) for each in part] for part in self.parts], ()).merged

    def replaced(self, whole: RunnerSession) -> StageStates:
        """The same stages and ranks with their layers and heads of `whole`. Mutates: self.

        Raises:
            ConfigError: it is of other sizes.
        """
        first, stages = 0, []
        for shares in self.parts:
            last = first + shares[0].state.key.shape[1]
            own = walk.layers_of(whole, first, last)
            cut = [walk.heads_of(own, share, len(shares)) for share in range(len(shares))]
            stages.append([walk.load(part, *walk.save(each)) for part, each in zip(shares, cut, strict=True)])
            first = last
        return StageStates(stages, self.weights)

    def give(self, ring: RingExecutor) -> None:
        """Put the states into the ring's exchange for `MessageKind.LOAD`."""
        for stage, shares in enumerate(self.parts):
            for share, part in enumerate(shares):
                ring.stage.exchange.put(stage_key(stage, share), walk.save(part))


def occupied(ring: RingExecutor, session: int) -> bool:
    """Whether something of a session, the present one or one before it, is in the ring or about to enter."""
    return any(
        session in {row.session for row in message.rows}
        or (message.update is not None and message.update.session == session)
        for message in ring.messages
    )


def _keys(ring: RingExecutor, ticket: int) -> list[list[str]]:
    """Exchange keys of the states saved by a ticket, by stage and share."""
    return [
        [ticket_key(stage_key(stage, share), ticket) for share in range(ring.stage.shares)]
        for stage in range(ring.stage.stages)
    ]


def collect(
    model: Model, stages: StageStates, head: State, stream: State, decoder: State, opened: Mapping[str, Any]
) -> Snapshot:
    """The snapshot of a session, of its parts at one moment; `opened` as `opened_with` has it."""
    states = {
        "stages": walk.save(stages.merged, "stages"),
        "head": head,
        "stream": stream,
        "decoder": walk.save(walk.restored(*decoder), "decoder"),
    }
    return Snapshot(
        model_facts(model.spec, model.denoiser.dtype, stages.weights),
        opened,
        {name: tree for name, (_, tree) in states.items()},
        about={},
        tensors={name: tensor for tensors, _ in states.values() for name, tensor in tensors.items()},
    )


def restore_into_ring(
    snapshot: Snapshot,
    ring: RingExecutor,
    model: Model,
    stream: StreamProgress,
    decoder: Sequence[Any],
    ticket: int,
) -> PendingSteps | None:
    """Restore a snapshot into a session that was opened as it says, whose blank states the stages have saved under
    `ticket`: load rank 0's part, and put those of the stages into the exchange. `decoder`: outlines that its memory may
    have. Returns the change of steps that is still to come. Mutates: ring, stream.

    Raises:
        ConfigError: other weights, sizes, or anything else that cannot be; nothing is left for the stages then.
    """
    stages, tensors, trees = StageStates.take(ring, ticket), snapshot.tensors, snapshot.trees
    snapshot.check_weights(stages.weights)
    head = head_state(ring, stream.session)
    pictures = (None, *remembered(model)) if model.first_frame_reencoder is not None else (None,)
    opened = Opened(model.spec, head, stages.merged_outline, stream, pictures)
    check_session(snapshot, opened, LOOSE)
    snapshot.check_loose(model.spec)
    check_memory(snapshot.outline, trees["decoder"], decoder, "decoder")
    check_content(tensors, trees, head.sampler.geometry)
    stages = stages.replaced(walk.restored(tensors, trees["stages"]))
    head = walk.load(head, tensors, trees["head"], ring.stage.device)
    walk.load(stream, tensors, trees["stream"])
    stages.give(ring)
    return head.pending


def remembered(model: Model) -> list[Any]:
    """What the decoder of `first_frame_reencoder` may remember, as outlines."""
    reencoder = model.first_frame_reencoder
    assert reencoder is not None
    latents = torch.zeros(model.spec.chunk_shape, device=reencoder.decoder.device)
    return memory_outlines(reencoder.new_memory, lambda memory: reencoder.decoder.decode_video(latents[None], memory),
                           model.spec.chunk_latents)  # fmt: skip


def resume(ring: RingExecutor, session: int, change: PendingSteps | None) -> None:
    """Let a session go on whose state has been loaded everywhere, with this change of steps to come. Mutates: ring."""
    if change is not None:
        ring.changes[session] = change
    ring.sampler.restore(session)
    ring.scheduler.hold(session, False)


def head_state(ring: RingExecutor, session: int) -> HeadState:
    """The head's own state of a session, not a copy."""
    return HeadState(ring.scheduler.session(session), ring.sampler.sessions[session], ring.changes.get(session))
