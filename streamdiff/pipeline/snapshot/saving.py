"""Saves sessions of a pipeline as snapshots, and loads them again, on all ranks.

A session is saved beside everything else. It is held until nothing of it is under way, and while each stage copies its
part, a piece at a time (`StageSaving`); then it goes on, and a thread puts the parts together. Decision 0045.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from streamdiff.core import Frames, StreamProgress
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.autoencoder.picture_decoder import memory_outlines
from streamdiff.models.model import Model
from streamdiff.pipeline.decode.decode_worker import SavedMemory
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate
from streamdiff.pipeline.distributed.state_exchange import State, stage_key, ticket_key
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.pipeline.runner.model_runner import StageState
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
from streamdiff.pipeline.snapshot.swapping import occupied
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import HostCopy

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline


@dataclass(frozen=True)
class StageStates:
    """The stages' states of a session, in host memory: by stage, first to last, one for each rank that shares it; and
    digests of the weights of all blocks."""

    parts: Sequence[Sequence[StageState]]
    weights: Sequence[str]

    @staticmethod
    def are_there(ring: Ring, ticket: int) -> bool:
        """Whether all states that `MessageKind.SAVE` puts into the ring's exchange are there."""
        return all(ring.stage.exchange.holds(key) for keys in _keys(ring, ticket) for key in keys)

    @classmethod
    def take(cls, ring: Ring, ticket: int) -> StageStates:
        """Take these states. Raises ConfigError where a stage has no such session: opening it failed there, or it has
        ended or begun afresh."""
        taken = [[ring.stage.exchange.take(key) for key in keys] for keys in _keys(ring, ticket)]
        broken = [tree["broken"] for there in taken for _, tree in there if "broken" in tree]
        if broken:
            raise ConfigError(broken[0])
        parts = [[walk.restored(tensors, tree["state"]) for tensors, tree in there] for there in taken]
        return cls(parts, [digest for there in taken for digest in there[0][1]["weights"]])

    @property
    def merged(self) -> StageState:
        """One state with all layers and heads."""
        return walk.joined([walk.with_all_heads(shares) for shares in self.parts])

    @property
    def merged_outline(self) -> StageState:
        """The same without content."""
        return StageStates([[walk.to_device(each, walk.META) for each in part] for part in self.parts], ()).merged

    def replaced(self, whole: StageState) -> StageStates:
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

    def give(self, ring: Ring) -> None:
        """Put the states into the ring's exchange for `MessageKind.LOAD`."""
        for stage, shares in enumerate(self.parts):
            for share, part in enumerate(shares):
                ring.stage.exchange.put(stage_key(stage, share), walk.save(part))


def _keys(ring: Ring, ticket: int) -> list[list[str]]:
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
    ring: Ring,
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


def resume(ring: Ring, session: int, change: PendingSteps | None) -> None:
    """Let a session go on whose state has been loaded everywhere, with this change of steps to come. Mutates: ring."""
    if change is not None:
        ring.changes[session] = change
    ring.sampler.restore(session)
    ring.scheduler.hold(session, False)


def head_state(ring: Ring, session: int) -> HeadState:
    """The head's own state of a session, not a copy."""
    return HeadState(ring.scheduler.session(session), ring.sampler.sessions[session], ring.changes.get(session))


_REST_WAIT_S = 0.1
"""How long a step waits for frames while a session comes to rest."""
_LOOK_S = 0.002


@dataclass
class _Saving:
    """A session that is being saved: copies of the head's part, and the future result in `made`. `held`: it stays held
    after the copy; `forgotten`: it has ended or begun afresh."""

    session: int
    head: HostCopy
    stream: HostCopy
    opened: dict[str, Any]
    video: GivenVideo | None
    decoder: SavedMemory
    finish: Callable[[Snapshot], Any]
    held: bool
    forgotten: bool = False
    made: Future[Any] | None = None


class RingSaving:
    """Saves sessions of a pipeline as snapshots, and restores them, on all ranks."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self._pipeline = pipeline
        self.savings: dict[int, _Saving] = {}  # by ticket
        self.blank: set[int] = set()  # tickets of sessions to be loaded, whose parts are still copied
        # While there are any of both, `advance` has work.
        self._ended = threading.Event()
        self._together = ThreadPoolExecutor(1, "snapshots", initializer=lambda: torch.set_num_threads(1))

    # ---- saving -------------------------------------------------------------------------------------------------

    def comes_to_rest(self, session: int) -> bool:
        """Hold a session; whether nothing of it is under way, so that `begin` may be called. Until then it makes
        nothing new."""
        self._pipeline.scheduler.hold(session, True)
        swapping = self._pipeline.swapping
        return swapping.at_rest(session) and not swapping.is_coming(session)

    def begin(
        self, session: int, finish: Callable[[Snapshot], Any] = lambda snapshot: snapshot, held: bool = False
    ) -> int:
        """Save a session that `comes_to_rest` as it is now; it goes on as soon as it is copied, with `held` when it is
        done. Returns a number under which `take_done` will give what `finish`, on a thread, makes of the snapshot.

        Raises:
            ConfigError: its noise was given as tensors; it goes on.
        """
        stream, head = self._pipeline.streams[session], head_state(self._pipeline, session)
        try:
            opened = opened_with(head)
        except ConfigError:
            self._let_go(session)
            raise
        ticket, copies = next(self._pipeline.swapping.tickets), self._pipeline.stage.swaps.copies
        parts = HostCopy(copies, head, "head"), HostCopy(copies, stream, "stream")
        for part in parts:
            part.go_on()
        copies.follow()
        decoder = self._pipeline.decoding.save(stream.number)
        video = self._pipeline.sampler.sessions[session].video
        self.savings[ticket] = _Saving(session, *parts, opened, video, decoder, finish, held)
        self._pipeline.tell(MessageKind.SAVE, SessionUpdate(session, ticket))
        return ticket

    def take_done(self) -> list[tuple[int, Any]]:
        """What has been saved, by the numbers of `begin`; a ConfigError where it ended or began afresh before it
        was copied. Told once."""
        done = [ticket for ticket, saving in self.savings.items() if saving.made is not None and saving.made.done()]
        return [(ticket, self._taken(ticket)) for ticket in done]

    def save(self, session: int) -> tuple[Snapshot, list[Frames]]:
        """A session as it is now. What it has in flight comes back first, and it goes on afterwards as if nothing had
        been; with frames that came meanwhile, after which the snapshot is taken.

        Raises:
            ConfigError: its noise was given as tensors.
            RequestError: it fails on the way.
            EngineFailure: as `step`.
        """
        frames = self._pipeline.swapping.await_return(session)
        try:
            while not self.comes_to_rest(session):
                frames += self._pipeline.step(_REST_WAIT_S)
            self._check_well(session)
            ticket = self.begin(session, held=True)
        except (ConfigError, RequestError):
            self._pipeline.undelivered += frames
            raise
        while (made := self.savings[ticket].made) is None or not made.done():
            frames += self._pipeline.step(_REST_WAIT_S)
        saved = self._taken(ticket)
        self._let_go(session)
        if isinstance(saved, ConfigError):
            self._pipeline.undelivered += frames
            raise saved
        return saved, frames

    def copies(self, session: int) -> bool:
        """Whether a session is being saved, and not done."""
        own = [each.made for each in self.savings.values() if each.session == session]
        return not all(made is not None and made.done() for made in own)

    def advance(self) -> bool:
        """Have the next pieces copied; whether any are still to be. Mutates: self, ring."""
        more = False
        for answer in self._pipeline.take_answers(MessageKind.SAVE):
            ticket, saving = answer.epoch, self.savings.get(answer.epoch)
            if answer.outcome is Outcome.NOT_YET:
                self._pipeline.tell(MessageKind.SAVE, SessionUpdate(answer.session, ticket))
                more = True
            elif saving is None:
                self.blank.discard(ticket)
            else:
                saving.made = self._together.submit(self._put_together, ticket, saving)
                saving.made.add_done_callback(lambda _: self._pipeline.wake())
                if not (saving.held or saving.forgotten):
                    self._let_go(saving.session)
        return more

    def _put_together(self, ticket: int, saving: _Saving) -> Any:
        """On the thread. Raises ConfigError where a stage had no such session any more."""
        decoder = None
        while decoder is None or not StageStates.are_there(self._pipeline, ticket):
            decoder = saving.decoder() if decoder is None else decoder  # gone once it is taken
            if self._ended.wait(_LOOK_S):
                raise ConfigError("the engine ends")
        stages = StageStates.take(self._pipeline, ticket)
        if "broken" in decoder[1]:
            raise ConfigError(decoder[1]["broken"])
        head, stream = saving.head.result(), saving.stream.result()
        whole = collect(self._pipeline.model, stages, head, stream, decoder, saving.opened)
        return saving.finish(whole.with_video(saving.video))

    def _taken(self, ticket: int) -> Any:
        made = self.savings.pop(ticket).made
        assert made is not None
        error = made.exception()
        if error is not None and not isinstance(error, ConfigError):
            raise error
        return error or made.result()

    def _let_go(self, session: int) -> None:
        self._pipeline.scheduler.hold(session, self._pipeline.swapping.is_away(session))

    def forget(self, session: int) -> None:
        """The session ends, or begins afresh. Mutates: self."""
        for saving in self.savings.values():
            saving.forgotten = saving.forgotten or saving.session == session

    def close(self) -> None:
        """The pipeline ends."""
        self._ended.set()
        self._pipeline.stage.exchange.close()
        self._together.shutdown(wait=False, cancel_futures=True)

    # ---- loading ------------------------------------------------------------------------------------------------

    def read_snapshot(self, data: bytes | memoryview) -> Snapshot:
        """The snapshot in a file's content. Raises ConfigError for what is none."""
        return Snapshot.from_bytes(data)

    def load(self, session: int, snapshot: Snapshot) -> list[Frames]:
        """Open a session that goes on, to the bit, where a snapshot was taken, on any number of stages. Returns
        frames of other sessions that came meanwhile.

        Raises:
            RequestError: it is of another model, other weights or sizes, or does not fit in; nothing is open then.
            EngineFailure: as `step`.
        """
        frames: list[Frames] = []
        try:
            snapshot.check_model(self._pipeline.model.spec, self._pipeline.model.denoiser.dtype)
            opened = snapshot.session
            self._pipeline.open(
                session, torch.zeros(self._pipeline.model.spec.text_shape), seed=opened["seed"], epoch=opened["epoch"],
                steps=opened["steps"], kv_context=opened["kv_context"],
            )  # fmt: skip
            ticket = next(self._pipeline.swapping.tickets)
            self.blank.add(ticket)
            frames += self._ask(MessageKind.SAVE, session, ticket)
            while ticket in self.blank or not StageStates.are_there(self._pipeline, ticket):
                frames += self._pipeline.step(_LOOK_S)
            stream = self._pipeline.streams[session]
            change = restore_into_ring(
                snapshot,
                self._pipeline,
                self._pipeline.model,
                stream,
                self._pipeline.decoding.outlines(self._pipeline.model.spec.chunk_shape),
                ticket,
            )
            self._pipeline.decoding.load(stream.number, (snapshot.tensors, snapshot.trees["decoder"]))
            frames += self._ask(MessageKind.LOAD, session)
        except (ConfigError, RequestError) as error:
            self._pipeline.undelivered += frames
            if session in self._pipeline.streams:
                self._pipeline.close_session(session)
            if isinstance(error, RequestError):
                raise
            raise RequestError("snapshot", str(error)) from error
        video = snapshot.video()
        self._pipeline.sampler.sessions[session].video = (
            None if video is None else video.on(self._pipeline.sampler.device)
        )
        resume(self._pipeline, session, change)
        return frames

    def _ask(self, kind: MessageKind, session: int, ticket: int = 0) -> list[Frames]:
        """Hold a session, tell all stages, and go on until nothing of it is in the ring or decoding. Returns frames
        that came meanwhile. Raises RequestError where it fails on the way."""
        frames: list[Frames] = []
        self._pipeline.scheduler.hold(session, True)
        self._pipeline.tell(kind, SessionUpdate(session, ticket))
        while occupied(self._pipeline, session) or self._pipeline.streams[session].decoding:
            frames += self._pipeline.step(_REST_WAIT_S)
        try:
            self._check_well(session)
        except RequestError:
            self._pipeline.undelivered += frames
            raise
        return frames

    def _check_well(self, session: int) -> None:
        """Raises RequestError where a session has failed."""
        if session in self._pipeline.failed:
            raise RequestError("session", "the session has failed meanwhile")
