"""What a control message and its fields may be: one declaration, that messages are checked by and described with.

The same for HTTP, data channel and WebSocket, and for the fields of a session's `POST` and `PATCH`.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from streamdiff.engine.validation import MAX_PROMPT_CHARACTERS, MAX_SEED

MAX_ID_CHARACTERS = 64
MAX_WHOLE = 2**53 - 1
"""As far as JavaScript counts."""
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
Switch = Literal["keep", "recache", "flush", "reset"]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS, description="denoise steps of a chunk, of those the model has")]
Fps = Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS, description="frames shown per second")]
Revision = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Id = Annotated[int, Field(ge=-MAX_WHOLE, le=MAX_WHOLE)] | Annotated[str, Field(max_length=MAX_ID_CHARACTERS)] | None


class Body(BaseModel):
    """What a stranger sends: nothing is converted and no field is unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Message(Body):
    id: Id = Field(None, description="said again in every answer to this message")


class _Change(_Message):
    if_rev: Revision | None = Field(None, description="only while the session's state has this revision")


class PromptMessage(_Change):
    """Show something else."""

    type: Literal["prompt"]
    prompt: Prompt
    switch: Switch | None = Field(None, description="what it does to the past; left out: what suits the model")


class ResetMessage(_Change):
    """Begin afresh."""

    type: Literal["reset"]
    seed: Seed | None = Field(None, description="left out: the session's")


class StepsMessage(_Change):
    """Make chunks in so many steps, from the next one on."""

    type: Literal["steps"]
    steps: Steps


class FpsMessage(_Change):
    """Show so many frames per second."""

    type: Literal["fps"]
    fps: Fps


class PauseMessage(_Change):
    """Hold the stream."""

    type: Literal["pause"]


class ResumeMessage(_Change):
    """Let the stream go on."""

    type: Literal["resume"]


class GetMessage(_Message):
    """Tell the state."""

    type: Literal["get"]


class PingMessage(_Message):
    """Answer."""

    type: Literal["ping"]


Message = (
    PromptMessage | ResetMessage | StepsMessage | FpsMessage | PauseMessage | ResumeMessage | GetMessage | PingMessage
)
MESSAGES: dict[str, type[Message]] = {
    "prompt": PromptMessage,
    "reset": ResetMessage,
    "steps": StepsMessage,
    "fps": FpsMessage,
    "pause": PauseMessage,
    "resume": ResumeMessage,
    "get": GetMessage,
    "ping": PingMessage,
}
"""Every kind of message, by its `type`."""


def control_message() -> dict[str, Any]:
    """JSON schema of a control message."""
    return {"oneOf": [model.model_json_schema() for model in MESSAGES.values()]}
