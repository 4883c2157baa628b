"""What the sessions' addresses take and give, as models that the API's description is made of.

Prompts are checked by `control.clean_prompt`, for these and for control messages alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamdiff.config import KVContext
from streamdiff.engine.messages import SWITCHES, Ready
from streamdiff.serve.control import (
    FIELDS,
    MAX_FPS,
    MAX_ID_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    MAX_REV,
    MAX_SEED,
    MIN_FPS,
    Control,
    ControlError,
    clean_prompt,
    steps_refusal,
)
from streamdiff.serve.problem import Problem

Switch = Literal["keep", "recache", "flush", "reset"]
_BodyT = TypeVar("_BodyT", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NewSession(_Body):
    """A session to open; what is left out is the server's default."""

    prompt: str | None = Field(None, description=f"what to show; up to {MAX_PROMPT_CHARACTERS:,} characters")
    seed: int = Field(0, ge=0, le=MAX_SEED)
    size: str | None = Field(None, description="WIDTHxHEIGHT; an engine has one, GET /api/sessions tells it")
    steps: int | None = Field(None, ge=1, description="denoise steps; a model has one or a few numbers of them")
    kv_context: KVContext | None = Field(None, description="what a chunk sees of earlier chunks")
    fps: float | None = Field(None, ge=MIN_FPS, le=MAX_FPS, description="frames shown per second")


class SessionChange(_Body):
    """What to change while it plays; what is left out stays. Carried out in the order of the fields here."""

    if_rev: int | None = Field(None, ge=0, le=MAX_REV, description="only while the state has this revision, else 409")
    fps: float | None = Field(None, ge=MIN_FPS, le=MAX_FPS, description="frames shown per second")
    steps: int | None = Field(None, ge=1, description="denoise steps, of those the model has, from the next chunk on")
    prompt: str | None = Field(None, description="from the next chunk on")
    switch: Switch | None = Field(None, description="what the new prompt does to the past; null: what suits the model")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="begins the stream afresh with it")


class SessionInfo(BaseModel):
    """An open session."""

    id: str
    prompt: str
    text: str = Field(description="the prompt as the model was given it")
    notice: str = Field(description="the model's remark on the prompt, or empty")
    seed: int
    steps: int = Field(description="denoise steps of a chunk")
    steps_known: list[int] = Field(description="those that `steps` may be changed to; empty: not told")
    kv_context: str
    fps: float = Field(description="frames shown per second")
    native_fps: float = Field(description="frames per second at which motion looks as the model was trained")
    width: int
    height: int
    paused: bool
    watched: bool
    rev: int = Field(description="goes up with every change")
    age_s: float
    ends_in_s: float | None = Field(description="when it ends by itself as things are; null: never")
    share: float = Field(description="of the engine's time, as measured")
    whep: str = Field(description="where to POST an offer to watch it")
    control: str = Field(description="where its control WebSocket is")
    stats: dict[str, Any]


class OpenedSession(SessionInfo):
    """A session that was opened just now. Its tokens are told this once."""

    view_token: str = Field(description="lets who shows it watch, where the server has a token")
    control_token: str = Field(description="lets who shows it steer and end the session")


class CapacityInfo(BaseModel):
    """What the engine can take."""

    room: int | None = Field(description="further sessions of the default kind; null: nothing was measured yet")
    work_s: float | None = Field(description="seconds of work in a chunk, measured")
    chunk_frames: int
    share: float = Field(description="of the engine's time that the open sessions ask for")
    share_limit: float
    occupancy: list[float] = Field(description="share of the time that each stage of a ring was at work")
    sessions_fit: int | None = Field(description="sessions of the default kind that the memory holds; null: unknown")
    size: str
    steps: list[int]
    native_fps: float
    draining: bool


class SessionList(BaseModel):
    """The open sessions that the caller may watch, oldest first."""

    sessions: list[SessionInfo]
    capacity: CapacityInfo


class Receipts(BaseModel):
    """What became of a change: one receipt for each request it was made of."""

    receipts: list[dict[str, Any]]
    session: SessionInfo


def read(model: type[_BodyT], body: bytes) -> _BodyT:
    """The body as a `model`; an empty one means all defaults.

    Raises:
        Problem: 400 for what is no JSON, 422 with the first field at fault and all of them in `errors`.
    """
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    if any(each["type"] == "json_invalid" for each in problems):
        raise Problem(400, f"The body is not JSON: {problems[0]['msg'][:120]}.", code="bad_json")
    errors = [{"field": ".".join(map(str, each["loc"])), "message": each["msg"]} for each in problems]
    first = errors[0]
    known = ", ".join(model.model_fields)
    detail = f"`{first['field'][:40]}`: {first['message']}." if first["field"] else f"{first['message']}."
    if problems[0]["type"] == "extra_forbidden":
        detail = f"There is no field {first['field'][:40]!r}; known: {known}."
    raise Problem(422, detail, code="invalid", field=first["field"][:40], errors=errors[:20])


def prompt_of(value: str) -> str:
    """A clean prompt. Raises Problem: 422."""
    try:
        return clean_prompt(value)
    except ControlError as error:
        raise Problem(422, str(error), code=error.code, field="prompt") from error


def check_new(wanted: NewSession, ready: Ready) -> None:
    """Raises Problem 422 for a size or steps that the engine does not have."""
    size = f"{ready.width}x{ready.height}"
    if wanted.size is not None and wanted.size.replace("*", "x") != size:
        raise Problem(422, f"`size` is {wanted.size[:20]!r}; this engine makes {size}.", code="invalid", field="size")
    _check_steps(wanted.steps, ready)


def _check_steps(steps: int | None, ready: Ready) -> None:
    if steps is not None and (why := steps_refusal(steps, ready.steps_known, ready.model)):
        raise Problem(422, why, code="invalid", field="steps")


def controls_of(change: SessionChange, ready: Ready) -> list[Control]:
    """The control messages that a change is made of, in their order.

    Raises:
        Problem: 422 for a change that cannot be, or none.
    """
    _check_steps(change.steps, ready)
    if "switch" in change.model_fields_set and change.prompt is None:
        raise Problem(422, "`switch` says how a new `prompt` comes in; give both.", code="invalid", field="switch")
    rev = change.if_rev
    controls = []
    if change.fps is not None:
        controls.append(Control("fps", fps=float(change.fps)))
    if change.steps is not None:
        controls.append(Control("steps", steps=change.steps))
    if change.prompt is not None:
        controls.append(Control("prompt", prompt=prompt_of(change.prompt), switch=change.switch or ""))
    if change.seed is not None:
        controls.append(Control("reset", seed=change.seed))
    if not controls:
        raise Problem(422, "The change is empty; give fps, steps, prompt or seed.", code="invalid", field="")
    # The revision goes up with the first of them, so only that one can ask for it.
    return [replace(controls[0], if_rev=rev), *controls[1:]]


_CONTROL_FIELDS: dict[str, dict[str, Any]] = {
    "id": {
        "oneOf": [{"type": "string", "maxLength": MAX_ID_CHARACTERS}, {"type": "integer"}],
        "description": "said again in every answer to this message",
    },
    "if_rev": {
        "type": ["integer", "null"],
        "minimum": 0,
        "maximum": MAX_REV,
        "description": "only while the state has it",
    },
    "prompt": {"type": "string", "minLength": 1, "maxLength": MAX_PROMPT_CHARACTERS},
    "switch": {"enum": list(SWITCHES), "description": "what it does to the past; left out: what suits the model"},
    "seed": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_SEED},
    "steps": {"type": "integer", "minimum": 1, "description": "denoise steps, of those the model has"},
    "fps": {"type": "number", "minimum": MIN_FPS, "maximum": MAX_FPS, "description": "frames shown per second"},
}


def control_message() -> dict[str, Any]:
    """JSON schema of a control message, as `control.parse` takes it; the same for HTTP, data channel and WebSocket."""
    return {"oneOf": [_kind_of_message(kind, fields) for kind, fields in FIELDS.items()]}


def _kind_of_message(kind: str, fields: frozenset[str]) -> dict[str, Any]:
    values = {name: _CONTROL_FIELDS[name] for name in sorted(fields - {"type"})}
    return {
        "type": "object",
        "title": kind,
        "properties": {"type": {"const": kind}} | values,
        "required": ["type", *({"prompt", "steps", "fps"} & {kind})],
        "additionalProperties": False,
    }
