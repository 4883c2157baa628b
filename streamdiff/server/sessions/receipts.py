"""Receipts of control messages: accepted, applied, shown or refused, per request id."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from streamdiff.server.sessions.control import ControlMessage, Id, Kind

# ---- receipts --------------------------------------------------------------------------------------------------------
Stage = Literal["asked", "accepted", "applied", "shown", "superseded", "refused"]


@dataclass(frozen=True)
class Receipt:
    """How far a request has come. `lag_s` counts from its arrival; `frame` is the first frame that obeys it, of chunk
    `chunk`, and `pts` its presentation time on the stream's media clock, in 90 kHz ticks. `switch` is what a
    prompt does to the past."""

    request: str
    owner: str
    id: Id
    kind: Kind
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

    def message(self) -> dict[str, Any]:
        """The JSON message for viewers: without what is unset, and without who asked."""
        body = {"type": "receipt", "id": self.id, "request": self.request, "kind": self.kind, "stage": self.stage}
        optional = {
            "lag_s": round(self.lag_s, 4),
            "epoch": self.epoch,
            "frame": self.frame,
            "chunk": self.chunk,
            "pts": self.pts,
            "text": self.text or None,
            "notice": self.notice or None,
            "field": self.field or None,
            "reason": self.reason or None,
            "switch": self.switch or None,
        }
        return body | {name: value for name, value in optional.items() if value is not None}


@dataclass
class _Open:
    request: str
    owner: str
    control: ControlMessage
    begun_s: float
    epoch: int | None = None
    frame: int | None = None
    chunk: int | None = None


class RequestTracker:
    """Follows requests from their arrival until their first frame is shown. Sans-IO; the caller gives the time.

    Holds at most `limit` open requests; the oldest is forgotten first.
    """

    def __init__(self, limit: int = 256) -> None:
        self._open: deque[_Open] = deque(maxlen=limit)
        self._count = 0

    def begin(self, control: ControlMessage, owner: str, now_s: float) -> str:
        """Register a request and name it. Mutates: self."""
        self._count += 1
        entry = _Open(f"r{self._count}", owner, control, now_s)
        self._open.append(entry)
        return entry.request

    @property
    def unanswered(self) -> int:
        """Requests that were neither accepted nor refused yet."""
        return sum(entry.epoch is None for entry in self._open)

    def find(self, request: str) -> ControlMessage | None:
        """The request of that name, while it is open."""
        return next((entry.control for entry in self._open if entry.request == request), None)

    def accepted(self, request: str, epoch: int, text: str, notice: str, now_s: float) -> list[Receipt]:
        """The engine took it. Mutates: self."""
        receipts = []
        for entry in self._matching(request):
            entry.epoch = epoch
            receipts.append(_receipt(entry, "accepted", now_s, text=text, notice=notice))
        return receipts

    def refused(self, request: str, field: str, reason: str, now_s: float) -> list[Receipt]:
        """The engine did not take it. Mutates: self."""
        receipts = [_receipt(entry, "refused", now_s, field=field, reason=reason) for entry in self._matching(request)]
        self.forget(request)
        return receipts

    def engine_lost(self, epoch: int | None, made_frames: int, reason: str, now_s: float) -> list[Receipt]:
        """The engine has ended; frames up to `made_frames` have come, and are still shown. What it had not taken is
        refused. Of what it took and made no frame for, the latest of each kind holds for the stream that begins again
        with `epoch`; None: none will, and that is refused too. Mutates: self."""
        ahead = [entry for entry in self._open if entry.frame is None or entry.frame >= made_frames]
        lasting = [entry for entry in ahead if entry.epoch is not None and not self._replaced(entry)]
        receipts = []
        for entry in ahead:
            entry.frame = entry.chunk = None
            if entry.epoch is None or epoch is None:
                receipts.append(_receipt(entry, "refused", now_s, reason=reason))
                self.forget(entry.request)
            elif entry in lasting:
                entry.epoch = epoch
        return receipts

    def applied(self, epoch: int, first_frame: int, now_s: float, chunk: int = 0) -> list[Receipt]:
        """The first chunk of `epoch` is made; with it hold older requests too that have not come so far, but for those
        that another took the place of. Mutates: self."""
        receipts = []
        reached = [entry for entry in self._open if entry.epoch is not None and entry.epoch <= epoch]
        replaced = [entry for entry in reached if self._replaced(entry, epoch)]
        for entry in reached:
            if entry.frame is not None:
                continue
            if entry in replaced:
                receipts.append(_receipt(entry, "superseded", now_s))
                self.forget(entry.request)
            else:
                entry.frame, entry.chunk = first_frame, chunk
                receipts.append(_receipt(entry, "applied", now_s))
        return receipts

    def shown(self, frame: int, epoch: int, now_s: float, pts: int = 0) -> list[Receipt]:
        """Frame number `frame` of `epoch` is on show, with presentation time `pts`. Mutates: self."""
        receipts = []
        reached = [entry for entry in self._open if entry.frame is not None and frame >= entry.frame]
        replaced = [entry for entry in reached if self._replaced(entry, epoch)]
        for entry in reached:
            late = entry in replaced
            receipts.append(_receipt(entry, "superseded", now_s) if late else _receipt(entry, "shown", now_s, pts=pts))
            self.forget(entry.request)
        return receipts

    def _replaced(self, entry: _Open, epoch: int | None = None) -> bool:
        """Whether a later request, of those up to `epoch`, took the place of this one, which was accepted: one of the
        same kind, or a reset that of a prompt. Other kinds hold beside each other."""
        mine, kind = entry.epoch or 0, entry.control.kind
        return any(
            other.epoch is not None
            and mine < other.epoch
            and (epoch is None or other.epoch <= epoch)
            and (other.control.kind == kind or (kind, other.control.kind) == ("prompt", "reset"))
            for other in self._open
        )

    def forget(self, request: str) -> None:
        """Nothing more will come of it. Mutates: self."""
        self._open = deque((entry for entry in self._open if entry.request != request), self._open.maxlen)

    def _matching(self, request: str) -> list[_Open]:
        return [entry for entry in self._open if entry.request == request]


def _receipt(entry: _Open, stage: Stage, now_s: float, **more: Any) -> Receipt:
    control = entry.control
    lag_s = max(0.0, now_s - entry.begun_s)
    place = (entry.epoch, entry.frame, entry.chunk)
    switch = control.switch if control.kind == "prompt" else ""
    return Receipt(entry.request, entry.owner, control.id, control.kind, stage, lag_s, *place, switch=switch, **more)
