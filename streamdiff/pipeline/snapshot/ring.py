"""What a ring has of a session, put together from its ranks, and given back to the ranks of this ring or another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.state_exchange import State
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.output import StreamProgress
from streamdiff.pipeline.runner.model_runner import RunnerSession
from streamdiff.pipeline.runner.noise import SeededNoise
from streamdiff.pipeline.runner.sampler import PendingSteps, SamplerSession
from streamdiff.pipeline.scheduler.scheduled_session import ScheduledSession
from streamdiff.pipeline.snapshot.file import Snapshot, model_facts
from streamdiff.session_state import walk
from streamdiff.session_state.fields import STATE, session_state


@session_state("ring-head")
@dataclass
class HeadState:
    """What the head alone has of a session."""

    scheduled: ScheduledSession = field(metadata=STATE)
    sampler: SamplerSession = field(metadata=STATE)
    pending: PendingSteps | None = field(default=None, metadata=STATE)


@dataclass(frozen=True)
class StageStates:
    """What the stages have of a session, first to last, in host memory, and digests of the weights of all blocks."""

    parts: Sequence[RunnerSession]
    weights: Sequence[str]

    @classmethod
    def take(cls, ring: RingExecutor) -> StageStates:
        """What `MessageKind.SAVE` has left in the ring's exchange."""
        parts, weights = [], []
        for stage in range(ring.stage.stages):
            tensors, tree = ring.stage.exchange.take(f"stage {stage}")
            parts.append(walk.restored(tensors, tree["state"]))
            weights += tree["weights"]
        return cls(parts, weights)

    def replaced(self, whole: RunnerSession) -> StageStates:
        """The same stages with their layers of `whole`. Mutates: self.

        Raises:
            ConfigError: it is of another number of layers, or of other sizes.
        """
        counts = [part.state.key.shape[1] for part in self.parts]
        if sum(counts) != whole.state.key.shape[1]:
            raise ConfigError(f"the snapshot has {whole.state.key.shape[1]} layers, but the model {sum(counts)}")
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        cut = [walk.layers_of(whole, end - count, end) for count, end in zip(counts, ends, strict=True)]
        parts = [walk.load(part, *walk.save(own)) for part, own in zip(self.parts, cut, strict=True)]
        return StageStates(parts, self.weights)

    def give(self, ring: RingExecutor) -> None:
        """Leave it in the ring's exchange for `MessageKind.LOAD`."""
        for stage, part in enumerate(self.parts):
            ring.stage.exchange.put(f"stage {stage}", walk.save(part))


def check_unshared(ring: RingExecutor) -> None:
    """Raises ConfigError where several ranks share a stage: each has the caches of its own heads, and stages save
    whole ones."""
    if ring.stage.heads != ring.stage.denoiser.heads:
        raise ConfigError(
            "sessions of ranks that share a stage (--parallel PxC with C above 1) can neither be saved nor go on from "
            "a snapshot; run it with --stages P"
        )


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
        "stages": walk.save(walk.joined(stages.parts), "stages"),
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


def place(snapshot: Snapshot, ring: RingExecutor, stream: StreamProgress) -> PendingSteps | None:
    """Put a snapshot into a session that was opened as it says, of which the stages have been asked for their part, and
    leave there what they are to load. Returns the change of steps that is still to come. Mutates: ring, stream.

    Raises:
        ConfigError: other weights, or sizes; nothing is left for the stages then.
    """
    stages, tensors, trees = StageStates.take(ring), snapshot.tensors, snapshot.trees
    snapshot.check_weights(stages.weights)
    stages = stages.replaced(walk.restored(tensors, trees["stages"]))
    head = walk.load(head_state(ring, stream.session), tensors, trees["head"], ring.stage.device)
    walk.load(stream, tensors, trees["stream"])
    stages.give(ring)
    return head.pending


def resume(ring: RingExecutor, session: int, change: PendingSteps | None) -> None:
    """Let a session go on whose state has been loaded everywhere, with this change of steps to come. Mutates: ring."""
    if change is not None:
        ring.changes[session] = change
    ring.sampler.restore(session)
    ring.scheduler.hold(session, False)


def head_state(ring: RingExecutor, session: int) -> HeadState:
    """The head's own state of a session, not a copy."""
    return HeadState(ring.scheduler.session(session), ring.sampler.sessions[session], ring.changes.get(session))


def opened_with(head: HeadState) -> dict[str, Any]:
    """What a session is opened with where it goes on. Raises ConfigError where its noise was given as tensors."""
    sampler, scheduled = head.sampler, head.scheduled
    if not isinstance(sampler.given, SeededNoise):
        raise ConfigError("a session whose noise was given as tensors cannot be saved; give it a seed")
    return {
        "seed": sampler.given.seed,
        "steps": sampler.schedule.steps,
        "next_steps": (sampler if head.pending is None else head.pending).schedule.steps,
        "kv_context": sampler.kv_context,
        "epoch": scheduled.epoch,
        "next_chunk": scheduled.next_chunk,
    }
