"""What a viewer may ask for: one validator for the data channel and for HTTP, and the book of open requests.

A message is checked whole before anything changes. Pure: knows nothing about sockets, the engine or the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from streamdiff.server.sessions import control_schema
from streamdiff.server.sessions.control_schema import MESSAGES

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
class ControlMessage:
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


def parse(data: str | bytes) -> ControlMessage:
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
    return ControlMessage(valid.type, **valid.model_dump(exclude={"type"}, exclude_none=True))


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
