"""Sessions of a pipeline come to rest and are put back: saved as snapshots and loaded, swapped out of device memory and
in again.

All are done in the same way. A session is held; COPY_OUT and PUT_BACK travel around the ring as all changes do, so
every stage acts at the same place of the order: after what has entered before, before what enters later; no stage
touches what is being sent. To save, a session comes to rest first, as its parts are joined to one file, and each stage
copies a piece at a time (`StateMover`) while others play. It can be swapped out in mid-chunk, as the head's latents
stay where they are; each rank keeps its own part. Decision 0032.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from operator import ne
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamdiff.core import Chunk, Frames
from streamdiff.errors import ConfigError, RequestError
from streamdiff.pipeline.decode.decode_worker import SavedMemory
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate
from streamdiff.pipeline.distributed.state_exchange import swapped
from streamdiff.pipeline.snapshot.checks import load_head, unfinished
from streamdiff.pipeline.snapshot.file import Snapshot, check_model, model_facts
from streamdiff.pipeline.snapshot.parts import SavedParts, exchange_keys, head_state, remembered, snapshot_of
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import HostCopy

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

_REST_WAIT_S = 0.1
"""How long a step waits for frames while a session comes to rest."""


@dataclass
class _Saving:
    """A session that is being saved: a copy of the head's part, and the future result in `made`, which `finish` makes
    of the parts. `blank`: only the outline of the stages' parts counts, and it stays held; `forgotten`: it has ended or
    restarted."""

    session: int
    head: HostCopy
    decoder: SavedMemory
    finish: Callable[[SavedParts], Any]
    blank: bool
    forgotten: bool = False
    made: Future[Any] | None = None


@dataclass
class _Away:
    """A session that is swapped out. `ticket`: of the PUT_BACK by which it is on its way back, if it is; `stages` and
    `decoder`: what they have answered."""

    ticket: int | None = None
    decoder_out: bool = False
    stages: Outcome = Outcome.NOT_YET
    decoder: Outcome = Outcome.NOT_YET


class RestingStates:
    """Brings sessions of a pipeline to rest, and puts them back, on all ranks."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self._pipeline = pipeline
        self.savings: dict[int, _Saving] = {}
        """Sessions that are being saved, by ticket."""
        self.away: dict[int, _Away] = {}
        """Sessions that are swapped out, or on their way back."""
        self._tickets = count()
        self._together = ThreadPoolExecutor(1, "snapshots", initializer=lambda: torch.set_num_threads(1))

    def at_rest(self, session: int) -> bool:
        """Whether nothing of a session is under way, and nothing of it may enter as things are."""
        pipeline = self._pipeline
        under_way = pipeline.occupied(session) or pipeline.streams[session].decoding
        return not under_way and not pipeline.scheduler.may_enter(session)

    @property
    def busy(self) -> bool:
        """Whether something will come by itself: what is saved, or sessions that are on their way back."""
        return bool(self.savings) or any(away.ticket is not None for away in self.away.values())

    def advance(self) -> bool:
        """Continue with all that is under way; whether the next step is not to wait. Mutates: self, ring."""
        more = False
        for kind, update in self._pipeline.take_answers():
            saving, away = self.savings.get(update.epoch), self.away.get(update.session)
            if saving is None and (away is None or away.ticket != update.epoch):
                continue
            if update.outcome is Outcome.NOT_YET:
                self._pipeline.tell(kind, replace(update, outcome=Outcome.DONE))
                more |= saving is not None
            elif saving is not None:
                self._copied(update.epoch, saving)
            elif away is not None:
                away.stages = update.outcome
        for session, away in list(self.away.items()):
            more |= self._swap_decoder(session, away)
        return more

    def forget(self, session: int) -> None:
        """The session ends, or restarts. Mutates: self."""
        self.away.pop(session, None)
        for saving in self.savings.values():
            saving.forgotten = saving.forgotten or saving.session == session

    def close(self) -> None:
        """The pipeline ends."""
        self._pipeline.stage.exchange.close()
        self._together.shutdown(wait=False, cancel_futures=True)

    def _tell(self, kind: MessageKind, update: SessionUpdate) -> int:
        """Send a message, and return its ticket. Mutates: ring."""
        ticket = next(self._tickets)
        self._pipeline.tell(kind, replace(update, epoch=ticket))
        return ticket

    def facts(self) -> dict[str, Any]:
        """What must be the same where a log is played again: the model's facts, and digests of the blocks here."""
        model = self._pipeline.model
        return model_facts(model.spec, model.denoiser.dtype) | {"weights": self._pipeline.stage.weights}

    def check_facts(self, theirs: Mapping[str, Any] | None) -> None:
        """Raises ConfigError where `facts` of a log, if there is one, are others here. In a ring each rank knows the
        weights of its own blocks: the first ones are compared."""
        if theirs is None:
            return
        check_model(theirs, here := self.facts(), "the log")
        weights = theirs.get("weights")
        if not isinstance(weights, list) or not weights or any(map(ne, weights, here["weights"])):
            why = "the log is of other weights than those that are loaded, though of the same kind of model; load those"
            raise ConfigError(why, field="weights", code="weights")

    # ---- swapping -----------------------------------------------------------------------------------------------

    def can_swap_out(self, session: int, returning: int | None = None) -> bool:
        """Whether host memory or disk has room for an open session's device state on all ranks, counting the room that
        session `returning` frees by coming back."""
        if session in self.away or self._copies(session):
            return False
        budget = self._pipeline.budget
        return budget is None or budget.away_fits(session, self._pipeline.stage.swaps.spills, returning)

    def swap_out(self, session: int) -> None:
        """Give a session's device memory back, of one that `can_swap_out`; it makes nothing until `swap_in`. What is in
        the ring comes back."""
        assert session not in self.away, f"session {session} is swapped out already, or not back yet"
        away = self.away[session] = _Away()
        self._pipeline.scheduler.hold(session, True)
        self._tell(MessageKind.COPY_OUT, SessionUpdate(session))
        if self._pipeline.budget is not None:
            self._pipeline.budget.swap_out(session)
        self._swap_decoder(session, away)

    def swap_in(self, session: int) -> None:
        """Let a session that is swapped out come back and go on. Does nothing where it is on its way.

        Raises:
            RequestError: there is no memory for it now, code "memory".
        """
        away = self.away[session]
        if away.ticket is None:
            if self._pipeline.budget is not None:
                self._pipeline.budget.swap_in(session)
            own = self._pipeline.sampler.sessions[session]
            update = SessionUpdate(session, steps=own.schedule.steps, kv_context=own.kv_context)
            away.ticket = self._tell(MessageKind.PUT_BACK, update)

    def place(self, session: int) -> str:
        """Location of the head's part of an open session: `device`, `host` or `disk`."""
        name, swaps = swapped(session), self._pipeline.stage.swaps
        return "device" if session not in self.away else swaps.location(name) if name in swaps else "host"

    def is_away(self, session: int) -> bool:
        """Whether an open session is swapped out, or not wholly back."""
        return session in self.away

    @property
    def lost(self) -> list[int]:
        """Sessions that cannot come back, as a file was damaged; each is away until `reset`."""
        return [session for session, away in self.away.items() if Outcome.LOST in (away.stages, away.decoder)]

    def _swap_decoder(self, session: int, away: _Away) -> bool:
        """What the decoder remembers goes when all that it is to decode of the session has come, and comes back with
        the session, which then continues. Returns whether it does. Mutates: self, away."""
        stream, decoding = self._pipeline.streams[session], self._pipeline.decoding
        if away.ticket is None:
            if not away.decoder_out and not stream.decoding and not self._pipeline.occupied(session):
                away.decoder_out = True
                decoding.swap_out(stream.number)
            return False
        if away.decoder is Outcome.NOT_YET:
            away.decoder = decoding.swap_in(stream.number) if away.decoder_out else Outcome.DONE
        if not away.stages is away.decoder is Outcome.DONE:
            return False
        del self.away[session]
        self._pipeline.scheduler.hold(session, False)
        return True

    # ---- saving -------------------------------------------------------------------------------------------------

    def nbytes(self, session: int) -> int:
        """What a snapshot of a session has at least, as far as is known."""
        return 0 if self._pipeline.budget is None else self._pipeline.budget.cache_bytes(session)

    def comes_to_rest(self, session: int) -> bool:
        """Hold a session; whether nothing of it is under way, so that `save` may be called. Until then it makes
        nothing new."""
        self._pipeline.scheduler.hold(session, True)
        away = self.away.get(session)
        return self.at_rest(session) and (away is None or away.ticket is None)

    def save(self, session: int, finish: Callable[[Snapshot], Any] = lambda snapshot: snapshot) -> int:
        """Save a session that `comes_to_rest` as it is now; it continues once it is copied. Returns a number under
        which `take_done` will give what `finish`, on a thread, makes of the snapshot.

        Raises:
            ConfigError: its noise was given as tensors; it continues.
        """
        pipeline = self._pipeline
        video = pipeline.sampler.sessions[session].video
        try:
            opened = head_state(pipeline, session).opened_with
        except ConfigError:
            self.let_go(session)
            raise
        return self._copy(session, lambda parts: finish(snapshot_of(pipeline.model, parts, opened, video)))

    def take_done(self) -> list[tuple[int, Any]]:
        """What has been saved, by the numbers of `save`; a ConfigError where it ended or restarted before it
        was copied. Told once."""
        done = [ticket for ticket, saving in self.savings.items() if saving.made is not None and saving.made.done()]
        return [(ticket, self._taken(ticket)) for ticket in done]

    def _copies(self, session: int) -> bool:
        """Whether a session is being saved, and not done."""
        own = [each.made for each in self.savings.values() if each.session == session]
        return not all(made is not None and made.done() for made in own)

    def _copy(self, session: int, finish: Callable[[SavedParts], Any], blank: bool = False) -> int:
        """Have a session at rest copied on all ranks; returns its ticket. Mutates: self, ring."""
        pipeline, copies = self._pipeline, self._pipeline.stage.swaps.copies
        head = HostCopy(copies, head_state(pipeline, session), "head")
        head.go_on()
        copies.follow()
        decoder = pipeline.decoding.save(pipeline.streams[session].number)
        ticket = self._tell(MessageKind.COPY_OUT, SessionUpdate(session, saved=True))
        self.savings[ticket] = _Saving(session, head, decoder, finish, blank)
        return ticket

    def _copied(self, ticket: int, saving: _Saving) -> None:
        """A session is copied, and continues. Mutates: saving, scheduler."""
        saving.made = self._together.submit(self._put_together, ticket, saving)
        saving.made.add_done_callback(lambda _: self._pipeline.wake())
        if not (saving.blank or saving.forgotten):
            self.let_go(saving.session)

    def _put_together(self, ticket: int, saving: _Saving) -> Any:
        """On the thread. Raises ConfigError where a stage has no such session any more."""
        exchange, keys = self._pipeline.stage.exchange, exchange_keys(self._pipeline, ticket)
        try:
            decoder = saving.decoder()
            taken = [[exchange.take(key) for key in shares] for shares in keys]
        except RuntimeError as error:  # the engine ends, or a rank does not answer
            raise ConfigError(str(error)) from error
        trees = [decoder[1], *(tree for shares in taken for _, tree in shares)]
        if broken := [tree["broken"] for tree in trees if "broken" in tree]:
            raise ConfigError(broken[0])
        device = walk.META if saving.blank else walk.CPU
        stages = [[walk.restored(tensors, tree["state"], device) for tensors, tree in shares] for shares in taken]
        weights = [digest for shares in taken for digest in shares[0][1]["weights"]]
        return saving.finish(SavedParts(stages, weights, saving.head.result(), decoder))

    def _taken(self, ticket: int) -> Any:
        made = self.savings.pop(ticket).made
        assert made is not None
        error = made.exception()
        if error is not None and not isinstance(error, ConfigError):
            raise error
        return error or made.result()

    def let_go(self, session: int) -> None:
        """A session that was to come to rest goes on. Mutates: scheduler."""
        self._pipeline.scheduler.hold(session, session in self.away)

    # ---- loading ------------------------------------------------------------------------------------------------

    def read_snapshot(self, data: bytes | memoryview) -> Snapshot:
        """The snapshot in a file's content. Raises ConfigError for what is none."""
        return Snapshot.from_bytes(data)

    def load(self, session: int, snapshot: Snapshot) -> list[Frames]:
        """Open a session that continues, to the bit, where a snapshot was taken, on any number of stages. Returns
        frames of other sessions that came meanwhile.

        Raises:
            RequestError: it is of another model, other weights or sizes, or does not fit in; nothing is open then.
            EngineFailure: as `step`.
        """
        pipeline, opened = self._pipeline, snapshot.session
        spec, frames = pipeline.model.spec, list[Frames]()
        try:
            check_model(snapshot.model, model_facts(spec, pipeline.model.denoiser.dtype))
            pipeline.open(
                session, torch.zeros(spec.text_shape), seed=opened.seed, epoch=opened.epoch, steps=opened.steps,
                kv_context=opened.kv_context,
            )  # fmt: skip
            while not self.comes_to_rest(session):
                frames += pipeline.step(_REST_WAIT_S)
            saving = self.savings[ticket := self._copy(session, lambda parts: parts, blank=True)]
            while saving.made is None or not saving.made.done():
                frames += pipeline.step(_REST_WAIT_S)
            if isinstance(blank := self._taken(ticket), ConfigError):
                raise blank
            self._put_back(session, snapshot, blank)
            while pipeline.occupied(session):
                frames += pipeline.step(_REST_WAIT_S)
            if session in pipeline.faults.failed_sessions:
                raise ConfigError("the session has failed meanwhile")
        except (ConfigError, RequestError, RecursionError) as error:
            pipeline.undelivered += frames
            if session in pipeline.streams:
                pipeline.close_session(session)
            if isinstance(error, RequestError):
                raise
            raise RequestError("snapshot", str(error)) from error
        pipeline.scheduler.hold(session, False)
        return frames

    def _put_back(self, session: int, snapshot: Snapshot, blank: SavedParts) -> None:
        """Put a snapshot into a session that was opened as it says, of which `blank` was saved: the head's and the
        decoder's part now, and those of the stages on their way to them. Mutates: ring, the session's stream.

        Raises:
            ConfigError: other weights, sizes, or anything else that cannot be; nothing is left for the stages then.
        """
        pipeline, model = self._pipeline, self._pipeline.model
        if snapshot.model.get("weights") != blank.weights:
            raise ConfigError(
                "the snapshot is of other weights than those that are loaded, though of the same kind of model; load "
                "it into those that it was saved with"
            )
        head, stream, tensors = head_state(pipeline, session), pipeline.streams[session], snapshot.tensors
        decoder = pipeline.decoding.outlines(model.spec.chunk_shape)
        device, loras = pipeline.stage.device, pipeline.loras.loaded
        load_head(snapshot, model.spec, head, blank.whole, remembered(model), decoder, device, loras)
        trees = snapshot.trees
        whole = blank.cut(walk.restored(tensors, trees["stages"]))
        ticket = next(self._tickets)
        for keys, parts in zip(exchange_keys(pipeline, ticket), whole, strict=True):
            for key, part in zip(keys, parts, strict=True):
                pipeline.stage.exchange.put(key, walk.save(part, fetch=Tensor.contiguous))
        if head.pending is not None:
            pipeline.changes[session] = head.pending
        if (video := snapshot.video) is not None:
            pipeline.sampler.sessions[session].video = video.on(pipeline.sampler.device)
        pipeline.decoding.load(stream.number, (tensors, trees["decoder"]))
        scheduled = head.scheduled
        for number, epoch in unfinished(scheduled).items():
            cost = (scheduled.steps + scheduled.extra(number) + 1) / (pipeline.info.steps + 1)
            stream.chunks[number] = Chunk(epoch, cost)
            stream.ahead_frames += pipeline.info.chunk_frames
        pipeline.tell(MessageKind.PUT_BACK, SessionUpdate(session, ticket, saved=True))

    def progress(self, session: int) -> tuple[int, int, int, bool]:
        """Of a session that was loaded: the last chunk whose frames have come, the epoch of the next one that comes,
        the latest epoch that it knows, and whether it is paused."""
        scheduled, chunks = self._pipeline.scheduler.session(session), self._pipeline.streams[session].chunks
        change = self._pipeline.changes.get(session)
        latest = scheduled.epoch if change is None else max(scheduled.epoch, change.epoch)
        oldest = min((chunk.epoch for chunk in chunks.values()), default=latest)
        return min(chunks, default=scheduled.next_chunk) - 1, oldest, latest, scheduled.paused
