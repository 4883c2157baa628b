"""What a ring has of a session, put together from its ranks, and given back to the ranks of this ring or another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import memory_outlines
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.state_exchange import State
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.output import StreamProgress
from streamdiff.pipeline.runner.model_runner import RunnerSession, state_place
from streamdiff.pipeline.runner.sampler import PendingSteps
from streamdiff.pipeline.snapshot.checks import (
    HeadState,
    Opened,
    check_content,
    check_memory,
    check_session,
    opened_with,
)
from streamdiff.pipeline.snapshot.file import LOOSE, Snapshot, model_facts
from streamdiff.session_state import walk


@dataclass(frozen=True)
class StageStates:
    """What the stages have of a session, in host memory: by stage, first to last, that of each rank that shares it; and
    digests of the weights of all blocks."""

    parts: Sequence[Sequence[RunnerSession]]
    weights: Sequence[str]

    @classmethod
    def take(cls, ring: RingExecutor) -> StageStates:
        """What `MessageKind.SAVE` has left in the ring's exchange. Raises ConfigError where a stage has no such
        session, as opening it failed there."""
        parts, weights = [], []
        for stage in range(ring.stage.stages):
            there = [ring.stage.exchange.take(state_place(stage, share)) for share in range(ring.stage.shares)]
            for _, tree in there:
                if "broken" in tree:
                    raise ConfigError(tree["broken"])
            parts.append([walk.restored(tensors, tree["state"]) for tensors, tree in there])
            weights += there[0][1]["weights"]
        return cls(parts, weights)

    @property
    def whole(self) -> RunnerSession:
        """All layers and heads."""
        return walk.joined([walk.with_all_heads(shares) for shares in self.parts])

    @property
    def whole_outline(self) -> RunnerSession:
        """The same without content."""
        return StageStates([[walk.to_device(each, walk.META) for each in part] for part in self.parts], ()).whole

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
        """Leave it in the ring's exchange for `MessageKind.LOAD`."""
        for stage, shares in enumerate(self.parts):
            for share, part in enumerate(shares):
                ring.stage.exchange.put(state_place(stage, share), walk.save(part))


def occupied(ring: RingExecutor, session: int) -> bool:
    """Whether something of a session, the present one or one before it, is in the ring or about to enter."""
    return any(
        session in {row.session for row in message.rows}
        or (message.control is not None and message.control.session == session)
        for message in ring.messages
    )


def collect(ring: RingExecutor, model: Model, stream: StreamProgress, decoder: State) -> Snapshot:
    """The snapshot of a session at rest, of which the stages have been asked for their part.

    Raises:
        ConfigError: its noise was given as tensors, so that it has no seed.
    """
    stages, head = StageStates.take(ring), head_state(ring, stream.session)
    states = {
        "stages": walk.save(stages.whole, "stages"),
        "head": walk.save(head, "head"),
        "stream": walk.save(stream, "stream"),
        "decoder": walk.save(walk.restored(*decoder), "decoder"),
    }
    return Snapshot(
        model_facts(model.spec, model.denoiser.dtype, stages.weights),
        opened_with(head),
        {name: tree for name, (_, tree) in states.items()},
        {name: tensor for tensors, _ in states.values() for name, tensor in tensors.items()},
    )


def place(
    snapshot: Snapshot, ring: RingExecutor, model: Model, stream: StreamProgress, decoder: Sequence[Any]
) -> PendingSteps | None:
    """Put a snapshot into a session that was opened as it says, of which the stages have been asked for their part, and
    leave there what they are to load. `decoder`: what it may remember, as outlines. Returns the change of steps that is
    still to come. Mutates: ring, stream.

    Raises:
        ConfigError: other weights, sizes, or anything else that cannot be; nothing is left for the stages then.
    """
    stages, tensors, trees = StageStates.take(ring), snapshot.tensors, snapshot.trees
    snapshot.check_weights(stages.weights)
    head = head_state(ring, stream.session)
    pictures = (None, *remembered(model)) if model.first_frame_reencoder is not None else (None,)
    opened = Opened(model.spec, head, stages.whole_outline, stream, pictures)
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
