"""Receipts of control messages: how far each request has come, and who gets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

from streamdiff.errors import StreamdiffError
from streamdiff.server.sessions.control import ControlMessage, Id, PromptMessage

Stage = Literal["asked", "accepted", "applied", "shown", "superseded", "refused"]
Mailbox = Callable[[dict[str, Any]], None]
T = TypeVar("T")
LOAD = "load"
"""Owner of requests that are made by the load limits, whose receipts go to all peers; also their reason."""


class StreamEnded(StreamdiffError):
    """The session ended before it answered."""


@dataclass(frozen=True)
class Receipt:
    """How far a request has come. `lag_s` counts from its arrival; `frame` is the first frame that obeys it, of chunk
    `chunk`, and `pts` its presentation time on the stream's media clock, in 90 kHz ticks. `switch` is what a
    prompt does to the past. `steps` and `fps`, with the reason `load`: what holds, as it is less than was asked for."""

    request: str
    owner: str
    id: Id
    kind: str
    stage: Stage
    lag_s: float
    epoch: int | None = None
    frame: int | None = None
    chunk: int | None = None
    pts: int | None = None
    text: str = ""
    notice: str = ""
    field: str = ""
    reason: str = ""
    switch: str = ""
    steps: int | None = None
    fps: float | None = None

    def message(self) -> dict[str, Any]:
        """The JSON message for viewers, without unset fields and without `owner`."""
        body = asdict(self) | {"lag_s": round(self.lag_s, 4)}
        del body["owner"]
        known = {name: value for name, value in body.items() if name == "id" or value not in (None, "")}
        return {"type": "receipt", **known}


@dataclass
class _Request:
    name: str
    owner: str
    control: ControlMessage
    begun_s: float
    less: dict[str, Any]
    epoch: int | None = None
    frame: int | None = None
    chunk: int | None = None

    def receipt(self, stage: Stage, now_s: float, **more: Any) -> Receipt:
        control, lag_s = self.control, max(0.0, now_s - self.begun_s)
        reached = (self.epoch, self.frame, self.chunk)
        switch = (control.switch or "") if isinstance(control, PromptMessage) else ""
        details = {"switch": switch, **({} if stage == "refused" else self.less), **more}
        return Receipt(self.name, self.owner, control.id, control.type, stage, lag_s, *reached, **details)


class RequestTracker:
    """Follows requests from their arrival until their first frame is shown. Sans-IO; the caller gives the time.

    Holds at most `limit` open requests; the oldest is forgotten first.
    """

    def __init__(self, limit: int = 256) -> None:
        self._open: dict[str, _Request] = {}
        self._limit = limit
        self._count = 0

    def begin(self, control: ControlMessage, owner: str, now_s: float, **less: Any) -> str:
        """Register a request; returns its name. `less`: receipt fields where load reduces what it requests. Mutates:
        self."""
        self._count += 1
        name = f"r{self._count}"
        if len(self._open) >= self._limit:
            self.forget(next(iter(self._open)))
        self._open[name] = _Request(name, owner, control, now_s, less)
        return name

    @property
    def unanswered(self) -> int:
        """Requests that were neither accepted nor refused yet."""
        return sum(request.epoch is None for request in self._open.values())

    def find(self, name: str) -> ControlMessage | None:
        """The message of the request of that name, while it is open."""
        request = self._open.get(name)
        return request.control if request is not None else None

    def forget(self, name: str) -> None:
        """Stop following a request. Mutates: self."""
        self._open.pop(name, None)

    def accepted(self, name: str, epoch: int, text: str, notice: str, now_s: float) -> list[Receipt]:
        """The engine took it. Mutates: self."""
        if (request := self._open.get(name)) is None:
            return []
        request.epoch = epoch
        return [request.receipt("accepted", now_s, text=text, notice=notice)]

    def refused(self, name: str, field: str, reason: str, now_s: float) -> list[Receipt]:
        """The engine did not take it. Mutates: self."""
        request = self._open.pop(name, None)
        return [] if request is None else [request.receipt("refused", now_s, field=field, reason=reason)]

    def engine_lost(self, epoch: int | None, made_frames: int, reason: str, now_s: float) -> list[Receipt]:
        """The engine has ended; frames before `made_frames` have come and will be shown. Requests not accepted are
        refused. Of accepted ones without a frame yet, the latest of each kind holds for the stream that restarts with
        `epoch`; None: there is no restart, and all are refused. Mutates: self."""
        ahead = [each for each in self._open.values() if each.frame is None or each.frame >= made_frames]
        lasting = [each for each in ahead if each.epoch is not None and not self._is_replaced(each)]
        receipts = []
        for request in ahead:
            request.frame = request.chunk = None
            if request.epoch is None or epoch is None:
                receipts.append(request.receipt("refused", now_s, reason=reason))
                self.forget(request.name)
            elif request in lasting:
                request.epoch = epoch
        return receipts

    def applied(self, epoch: int, first_frame: int, now_s: float, chunk: int = 0) -> list[Receipt]:
        """The first chunk of `epoch` is made. It applies older requests too that were not applied yet, except those
        that a later one replaced. Mutates: self."""
        receipts, taken = [], [each for each in self._open.values() if each.epoch is not None and each.epoch <= epoch]
        replaced = [each for each in taken if self._is_replaced(each, epoch)]
        for request in taken:
            if request.frame is None and request in replaced:
                receipts.append(request.receipt("superseded", now_s))
                self.forget(request.name)
            elif request.frame is None:
                request.frame, request.chunk = first_frame, chunk
                receipts.append(request.receipt("applied", now_s))
        return receipts

    def shown(self, frame: int, epoch: int, now_s: float, pts: int = 0) -> list[Receipt]:
        """Frame number `frame` of `epoch` is on show, with presentation time `pts`. Mutates: self."""
        reached = [each for each in self._open.values() if each.frame is not None and frame >= each.frame]
        replaced = [each for each in reached if self._is_replaced(each, epoch)]
        for request in reached:
            self.forget(request.name)
        return [
            each.receipt("superseded", now_s) if each in replaced else each.receipt("shown", now_s, pts=pts)
            for each in reached
        ]

    def _is_replaced(self, request: _Request, epoch: int | None = None) -> bool:
        """Whether a later request, of those up to `epoch`, replaced this one, which was accepted: one of the same
        kind, or a reset a prompt. Requests of other kinds do not affect each other."""
        mine, kind = request.epoch or 0, request.control.type
        return any(
            other.epoch is not None
            and mine < other.epoch
            and (epoch is None or other.epoch <= epoch)
            and (other.control.type == kind or (kind, other.control.type) == ("prompt", "reset"))
            for other in self._open.values()
        )


class Subscribers:
    """Peers connected to one session, by name: each has a mailbox for messages. Lives on the event loop."""

    def __init__(self) -> None:
        self._mailboxes: dict[str, tuple[Mailbox, bool]] = {}

    def __len__(self) -> int:
        return len(self._mailboxes)

    def join(self, name: str, mailbox: Mailbox, may_control: bool) -> None:
        """Add a peer. Mutates: self."""
        self._mailboxes[name] = mailbox, may_control

    def leave(self, name: str) -> None:
        """Remove a peer. Mutates: self."""
        self._mailboxes.pop(name, None)

    def send(self, name: str, message: dict[str, Any]) -> None:
        """Send a message to a peer, if it is still connected."""
        if name in self._mailboxes:
            self._mailboxes[name][0](message)

    def broadcast(self, message: dict[str, Any], to_viewers: dict[str, Any] | None = None) -> None:
        """Send a message to all peers; `to_viewers`: instead of it, to those that may not control."""
        for mailbox, may_control in list(self._mailboxes.values()):
            mailbox(message if to_viewers is None or may_control else to_viewers)


class PendingAnswers(Generic[T]):
    """Answers that callers wait for, by name. Lives on the event loop."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[T]] = {}

    @contextlib.contextmanager
    def expect(self, name: str) -> Iterator[asyncio.Future[T]]:
        """Context manager: a future of the first answer of that name. Mutates: self."""
        self._futures[name] = asyncio.get_running_loop().create_future()
        try:
            yield self._futures[name]
        finally:
            del self._futures[name]

    def settle(self, name: str, answer: T | Exception) -> bool:
        """Give the caller its answer, or an error to raise; False where nobody waits for one. Mutates: self."""
        if (future := self._futures.get(name)) is None:
            return False
        if not future.done():
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        return True

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail all pending answers, each with an error of its own. Mutates: self."""
        for name in self._futures:
            self.settle(name, error())
