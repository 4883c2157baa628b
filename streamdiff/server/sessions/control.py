"""Control messages: what they are, and their parsing, from data channels, WebSockets and HTTP alike.

The models below check messages and make the API's description; the bodies of `/api/sessions` share their field types.
A message is checked whole before anything changes. Pure: knows nothing about sockets, the engine or the clock.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, Literal, get_args

import psutil
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from streamdiff.core import PromptPolicy
from streamdiff.engine.messages import Pictures, Ready
from streamdiff.engine.validation import MAX_PROMPT_CHARACTERS, MAX_SEED

MAX_MESSAGE_BYTES, MAX_BODY_BYTES = 16 * 1024, 256 * 1024
LARGEST_SNAPSHOT_BYTES = psutil.virtual_memory().total // 8
"""Of a saved session that is sent to go on here."""
MESSAGES_PER_S = 50

MAX_ID_CHARACTERS = 64
MAX_SAFE_INTEGER = 2**53 - 1
"""The largest that JavaScript represents exactly."""
MAX_STEPS = 1000
MIN_FPS, MAX_FPS = 1.0, 120.0


def _clean_prompt(value: str) -> str:
    """The prompt with its white space normalised."""
    if "\0" in value:
        raise PydanticCustomError("prompt", "a prompt has no NUL character")
    words = "".join(" " if unicodedata.category(character) == "Cc" else character for character in value).split()
    if not words:
        raise PydanticCustomError("prompt", "it is empty; describe what you want to see")
    return " ".join(words)


Prompt = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_PROMPT_CHARACTERS,
        # `_clean_prompt` in the words of JSON Schema: no NUL, and a character that is no white space.
        json_schema_extra={"pattern": r"^[^\u0000]*[^\s\u0000-\u001f\u007f-\u009f][^\u0000]*$"},
    ),
    AfterValidator(_clean_prompt),
]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS, description="denoise steps of a chunk, of those the model has")]
Strength = Annotated[float, Field(gt=0, le=1, description="near 0: the video as it is; 1: the prompt alone")]
Fps = Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS, description="frames shown per second")]
Revision = Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER)]
Id = (
    Annotated[int, Field(ge=-MAX_SAFE_INTEGER, le=MAX_SAFE_INTEGER)]
    | Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]
    | None
)


class Body(BaseModel):
    """Base of what clients send: strict types, and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Message(Body):
    id: Id = Field(None, description="said again in every answer to this message")


class ChangeMessage(_Message):
    """Base of messages that change the session."""

    if_rev: Revision | None = Field(None, description="only while the session's state has this revision")


class PromptMessage(ChangeMessage):
    """Show something else."""

    type: Literal["prompt"]
    prompt: Prompt
    switch: PromptPolicy | None = Field(None, description="what it does to the past; left out: what suits the model")


class ResetMessage(ChangeMessage):
    """Start over."""

    type: Literal["reset"]
    seed: Seed | None = Field(None, description="left out: the session's")


class PictureReset(ResetMessage):
    """Start over from a picture, or with None from none; over HTTP alone, as messages are small."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    picture: SkipValidation[Pictures | None]


class StepsMessage(ChangeMessage):
    """Make chunks in so many steps, from the next one on."""

    type: Literal["steps"]
    steps: Steps


class StrengthMessage(ChangeMessage):
    """Mix so much noise with the video that feeds the session."""

    type: Literal["strength"]
    strength: Strength


class FpsMessage(ChangeMessage):
    """Show so many frames per second."""

    type: Literal["fps"]
    fps: Fps


class AdaptiveMessage(ChangeMessage):
    """Under load, give up steps and then frame rate, or do not."""

    type: Literal["adaptive"]
    adaptive: bool


class PauseMessage(ChangeMessage):
    """Hold the stream."""

    type: Literal["pause"]


class ResumeMessage(ChangeMessage):
    """Let the stream go on."""

    type: Literal["resume"]


class GetMessage(_Message):
    """Tell the state."""

    type: Literal["get"]


class PingMessage(_Message):
    """Answer."""

    type: Literal["ping"]


ControlMessage = (
    PromptMessage
    | ResetMessage
    | StepsMessage
    | StrengthMessage
    | FpsMessage
    | AdaptiveMessage
    | PauseMessage
    | ResumeMessage
    | GetMessage
    | PingMessage
)
MESSAGES: dict[str, type[ControlMessage]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(ControlMessage)
}
"""The models of control messages by their `type`."""


_ID: TypeAdapter[Id] = TypeAdapter(Id)


class ControlError(ValueError):
    """A message that is refused: a code for programs, a sentence for people, the field at fault."""

    def __init__(self, code: str, message: str, field: str = "", id: Id = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.id = id


def message_schema() -> dict[str, Any]:
    """JSON schema of a control message."""
    return {"oneOf": [model.model_json_schema() for model in MESSAGES.values()]}


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
    id, kind = _id(message), message.get("type")
    if not isinstance(kind, str) or kind not in MESSAGES:
        known = ", ".join(MESSAGES)
        raise ControlError("unknown_type", f"`type` must be one of {known}; got {_echo(kind)}.", "type", id)
    # Before pydantic writes of each unknown field that it is wrong.
    if unknown := next((name[:40] for name in message if name not in MESSAGES[kind].model_fields), None):
        text = f"A {kind} message has no field {_echo(unknown)}; it takes {', '.join(MESSAGES[kind].model_fields)}."
        raise ControlError("unknown_field", text, unknown, id)
    try:
        return MESSAGES[kind].model_validate(message)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)[0], id) from error


def _id(message: dict[str, Any]) -> Id:
    """The id of a message that may be wrong otherwise; None where it is wrong itself."""
    try:
        return _ID.validate_python(message.get("id"), strict=True)
    except ValidationError:
        return None


def _refusal(kind: str, fault: ErrorDetails, id: Id) -> ControlError:
    """The first thing that is wrong with a message, in our words."""
    field = str(fault["loc"][0])[:40]
    code = "bad_prompt" if field == "prompt" else "out_of_range"
    if fault["type"] == "missing":
        return ControlError(code, f"A {kind} message needs `{field}`.", field, id)
    return ControlError(code, f"`{field}` is {_echo(fault['input'])}: {fault['msg']}.", field, id)


def steps_refusal(steps: int, ready: Ready) -> str:
    """Why chunks cannot have so many steps; "" where they can, or the engine has not said which."""
    if not ready.steps_known or steps in ready.steps_known:
        return ""
    return f"`steps` is {_echo(steps)}; the model {ready.model} has {', '.join(map(str, ready.steps_known))}."


def _echo(value: Any) -> str:
    return repr(value)[:42]
