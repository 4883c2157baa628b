"""What a viewer may ask for: one validator for the data channel and for HTTP, and the book of open requests.

A message is checked whole before anything changes. Pure: knows nothing about sockets, the engine or the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from streamdiff.serve import control_schema
from streamdiff.serve.control_schema import MESSAGES

Kind = Literal["prompt", "reset", "steps", "fps", "pause", "resume", "get", "ping"]
Id = str | int | None

MAX_MESSAGE_BYTES = 16 * 1024
MAX_BODY_BYTES = 256 * 1024
MESSAGES_PER_S = 50

_ID: TypeAdapter[Id] = TypeAdapter(control_schema.Id)


class ControlError(ValueError):
    """A message that is not obeyed: a short code for programs, a sentence for people, the field at fault."""

    def __init__(self, code: str, message: str, field: str = "", id: Id = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.id = id


@dataclass(frozen=True)
class Control:
    """One valid message. `prompt` and `switch` are of kind `prompt`, `steps` of `steps`, `fps` of `fps`; `seed` may be
    set for `reset`. An empty `switch` is the first of those that the session can have.

    `if_rev`: carried out only while the session's state has this revision.
    """

    kind: Kind
    id: Id = None
    prompt: str = ""
    seed: int | None = None
    switch: str = ""
    steps: int = 0
    fps: float = 0.0
    if_rev: int | None = None

    @property
    def changes(self) -> bool:
        """Whether the session is another afterwards."""
        return self.kind not in ("get", "ping")


def parse(data: str | bytes) -> Control:
    """Read one JSON message.

    Raises:
        ControlError: it is not JSON, not a known message, or a value is out of range; nothing may change then.
    """
    try:
        message = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ControlError("bad_json", f"This is not JSON: {str(error)[:120]}.") from error
    if not isinstance(message, dict):
        raise ControlError("bad_message", f"A message is a JSON object, not {type(message).__name__}.")
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in MESSAGES:
        known = ", ".join(MESSAGES)
        raise ControlError("unknown_type", f"`type` must be one of {known}; got {_echo(kind)}.", "type", _id(message))
    try:
        valid = MESSAGES[kind].model_validate(message)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)[0], _id(message)) from error
    return Control(valid.type, **valid.model_dump(exclude={"type"}, exclude_none=True))


def _id(message: dict[str, Any]) -> Id:
    """The id of a message that may be wrong otherwise; None where it is wrong itself."""
    try:
        return _ID.validate_python(message.get("id"), strict=True)
    except ValidationError:
        return None


def _refusal(kind: str, fault: ErrorDetails, id: Id) -> ControlError:
    """The first thing that is wrong with a message, in our words."""
    field = str(fault["loc"][0])[:40]
    if fault["type"] == "extra_forbidden":
        known = ", ".join(MESSAGES[kind].model_fields)
        return ControlError(
            "unknown_field", f"A {kind} message has no field {_echo(field)}; it takes {known}.", field, id
        )
    code = "bad_prompt" if field == "prompt" else "out_of_range"
    if fault["type"] == "missing":
        return ControlError(code, f"A {kind} message needs `{field}`.", field, id)
    return ControlError(code, f"`{field}` is {_echo(fault['input'])}: {fault['msg']}.", field, id)


def steps_refusal(steps: int, known: Sequence[int], model: str) -> str:
    """Why chunks cannot have so many steps; "" where they can, or the engine has not said which (`known` is empty)."""
    if not known or steps in known:
        return ""
    return f"`steps` is {_echo(steps)}; the model {model} has {', '.join(map(str, known))}."


def _echo(value: Any) -> str:
    return repr(value)[:42]


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
    control: Control
    begun_s: float
    epoch: int | None = None
    frame: int | None = None
    chunk: int | None = None


class RequestBook:
    """Follows requests from their arrival until their first frame is shown. Sans-IO; the caller gives the time.

    Holds at most `limit` open requests; the oldest is forgotten first.
    """

    def __init__(self, limit: int = 256) -> None:
        self._open: deque[_Open] = deque(maxlen=limit)
        self._count = 0

    def begin(self, control: Control, owner: str, now_s: float) -> str:
        """Register a request and name it. Mutates: self."""
        self._count += 1
        entry = _Open(f"r{self._count}", owner, control, now_s)
        self._open.append(entry)
        return entry.request

    @property
    def unanswered(self) -> int:
        """Requests that were neither accepted nor refused yet."""
        return sum(entry.epoch is None for entry in self._open)

    def find(self, request: str) -> Control | None:
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
