"""Saving sessions of a pipeline and loading them again.

A session is saved beside everything else. It is held until nothing of it is under way, and while each stage copies its
part, a piece at a time (`stage_saving`); then it goes on, and a thread puts the parts together. Decision 0045.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.model import Model
from streamdiff.pipeline.decode.decode_worker import SavedMemory
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate
from streamdiff.pipeline.output import Frames
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.pipeline.snapshot.checks import opened_with
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.snapshot.ring import StageStates, collect, head_state, occupied, restore_into_ring, resume
from streamdiff.pipeline.snapshot.swapping import SwapMixin
from streamdiff.session_state.host_copies import HostCopy

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


class SnapshotMixin(SwapMixin):
    """`StreamingPipeline`'s methods that save sessions as snapshots and restore them."""

    model: Model
    _failed: set[int]
    _came: list[Frames]

    def __init__(self) -> None:
        super().__init__()
        self._savings: dict[int, _Saving] = {}  # by ticket
        self._blank: set[int] = set()  # tickets of sessions to be loaded, whose parts are still copied
        self._ended = threading.Event()
        self._together = ThreadPoolExecutor(1, "snapshots", initializer=lambda: torch.set_num_threads(1))

    @abstractmethod
    def open(
        self, session: int, conditioning: Tensor, *, seed: int, epoch: int, steps: int, kv_context: str,
        background: bool = False, start: Tensor | None = None, video: GivenVideo | None = None,
    ) -> None:  # fmt: skip
        """Start a stream."""

    @abstractmethod
    def close_session(self, session: int) -> None:
        """End a stream."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake a waiting `step`."""

    # ---- saving -------------------------------------------------------------------------------------------------

    def comes_to_rest(self, session: int) -> bool:
        """Hold a session; whether nothing of it is under way, so that `begin_save` may be called. Until then it makes
        nothing new."""
        self.ring.scheduler.hold(session, True)
        return self.at_rest(session) and not self.is_coming(session)

    def begin_save(
        self, session: int, finish: Callable[[Snapshot], Any] = lambda snapshot: snapshot, held: bool = False
    ) -> int:
        """Save a session that `comes_to_rest` as it is now; it goes on as soon as it is copied, with `held` when it is
        done. Returns a number under which `take_saved` will give what `finish`, on a thread, makes of the snapshot.

        Raises:
            ConfigError: its noise was given as tensors; it goes on.
        """
        stream, head = self._streams[session], head_state(self.ring, session)
        try:
            opened = opened_with(head)
        except ConfigError:
            self._let_go(session)
            raise
        ticket, copies = next(self._tickets), self.ring.stage.swaps.copies
        parts = HostCopy(copies, head, "head"), HostCopy(copies, stream, "stream")
        for part in parts:
            part.go_on()
        copies.follow()
        decoder = self._decoding.save(stream.number)
        video = self.ring.sampler.sessions[session].video
        self._savings[ticket] = _Saving(session, *parts, opened, video, decoder, finish, held)
        self.ring.tell(MessageKind.SAVE, SessionUpdate(session, ticket))
        return ticket

    def take_saved(self) -> list[tuple[int, Any]]:
        """What has been saved, by the numbers of `begin_save`; a ConfigError where it ended or began afresh before it
        was copied. Told once."""
        done = [ticket for ticket, saving in self._savings.items() if saving.made is not None and saving.made.done()]
        return [(ticket, self._taken(ticket)) for ticket in done]

    def save(self, session: int) -> tuple[Snapshot, list[Frames]]:
        """A session as it is now. What it has in flight comes back first, and it goes on afterwards as if nothing had
        been; with frames that came meanwhile, after which the snapshot is taken.

        Raises:
            ConfigError: its noise was given as tensors.
            RequestError: it fails on the way.
            EngineFailure: as `step`.
        """
        frames = self._come_back(session)
        try:
            while not self.comes_to_rest(session):
                frames += self.step(_REST_WAIT_S)
            self._check_well(session)
            ticket = self.begin_save(session, held=True)
        except (ConfigError, RequestError):
            self._came += frames
            raise
        while (made := self._savings[ticket].made) is None or not made.done():
            frames += self.step(_REST_WAIT_S)
        saved = self._taken(ticket)
        self._let_go(session)
        if isinstance(saved, ConfigError):
            self._came += frames
            raise saved
        return saved, frames

    @property
    def saving(self) -> bool:
        """Whether something is being saved."""
        return bool(self._savings)

    def can_swap_out(self, session: int, returning: int | None = None) -> bool:
        own = [each.made for each in self._savings.values() if each.session == session]
        return all(made is not None and made.done() for made in own) and super().can_swap_out(session, returning)

    def _turn_saves(self) -> bool:
        """Have the next pieces copied; whether any are still to be. Mutates: self, ring."""
        more = False
        for answer in self.ring.take_answers(MessageKind.SAVE):
            ticket, saving = answer.epoch, self._savings.get(answer.epoch)
            if answer.outcome is Outcome.NOT_YET:
                self.ring.tell(MessageKind.SAVE, SessionUpdate(answer.session, ticket))
                more = True
            elif saving is None:
                self._blank.discard(ticket)
            else:
                saving.made = self._together.submit(self._put_together, ticket, saving)
                saving.made.add_done_callback(lambda _: self._wake())
                if not (saving.held or saving.forgotten):
                    self._let_go(saving.session)
        return more

    def _put_together(self, ticket: int, saving: _Saving) -> Any:
        """On the thread. Raises ConfigError where a stage had no such session any more."""
        decoder = None
        while decoder is None or not StageStates.are_there(self.ring, ticket):
            decoder = saving.decoder() if decoder is None else decoder  # gone once it is taken
            if self._ended.wait(_LOOK_S):
                raise ConfigError("the engine ends")
        stages = StageStates.take(self.ring, ticket)
        if "broken" in decoder[1]:
            raise ConfigError(decoder[1]["broken"])
        head, stream = saving.head.result(), saving.stream.result()
        whole = collect(self.model, stages, head, stream, decoder, saving.opened)
        return saving.finish(whole.with_video(saving.video))

    def _taken(self, ticket: int) -> Any:
        made = self._savings.pop(ticket).made
        assert made is not None
        error = made.exception()
        if error is not None and not isinstance(error, ConfigError):
            raise error
        return error or made.result()

    def _let_go(self, session: int) -> None:
        self.ring.scheduler.hold(session, self.is_away(session))

    def _forget_saving(self, session: int) -> None:
        """The session ends, or begins afresh. Mutates: self."""
        for saving in self._savings.values():
            saving.forgotten = saving.forgotten or saving.session == session

    def _end_saves(self) -> None:
        """The pipeline ends."""
        self._ended.set()
        self.ring.stage.exchange.close()
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
            snapshot.check_model(self.model.spec, self.model.denoiser.dtype)
            opened = snapshot.session
            self.open(
                session, torch.zeros(self.model.spec.text_shape), seed=opened["seed"], epoch=opened["epoch"],
                steps=opened["steps"], kv_context=opened["kv_context"],
            )  # fmt: skip
            ticket = next(self._tickets)
            self._blank.add(ticket)
            frames += self._ask(MessageKind.SAVE, session, ticket)
            while ticket in self._blank or not StageStates.are_there(self.ring, ticket):
                frames += self.step(_LOOK_S)
            stream = self._streams[session]
            change = restore_into_ring(
                snapshot, self.ring, self.model, stream, self._decoding.outlines(self.model.spec.chunk_shape), ticket
            )
            self._decoding.load(stream.number, (snapshot.tensors, snapshot.trees["decoder"]))
            frames += self._ask(MessageKind.LOAD, session)
        except (ConfigError, RequestError) as error:
            self._came += frames
            if session in self._streams:
                self.close_session(session)
            if isinstance(error, RequestError):
                raise
            raise RequestError("snapshot", str(error)) from error
        video = snapshot.video()
        self.ring.sampler.sessions[session].video = None if video is None else video.on(self.ring.sampler.device)
        resume(self.ring, session, change)
        return frames

    def _ask(self, kind: MessageKind, session: int, ticket: int = 0) -> list[Frames]:
        """Hold a session, tell all stages, and go on until nothing of it is in the ring or decoding. Returns frames
        that came meanwhile. Raises RequestError where it fails on the way."""
        frames: list[Frames] = []
        self.ring.scheduler.hold(session, True)
        self.ring.tell(kind, SessionUpdate(session, ticket))
        while occupied(self.ring, session) or self._streams[session].decoding:
            frames += self.step(_REST_WAIT_S)
        try:
            self._check_well(session)
        except RequestError:
            self._came += frames
            raise
        return frames

    def _check_well(self, session: int) -> None:
        """Raises RequestError where a session has failed."""
        if session in self._failed:
            raise RequestError("session", "the session has failed meanwhile")
