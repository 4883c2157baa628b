"""Pydantic models of the requests and responses under `/api/sessions`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from streamdiff.core import Control, KVContext, PromptPolicy
from streamdiff.engine.messages import DEFAULT_STRENGTH, Pictures, Ready
from streamdiff.engine.timeline import Lora
from streamdiff.server.outputs.output import OutputStatus
from streamdiff.server.problem import Problem
from streamdiff.server.routes.bodies import MAX_JSON_BYTES
from streamdiff.server.sessions import control
from streamdiff.server.sessions.control import Body, Fps, Prompt, Seed, Steps, Strength
from streamdiff.video.picture import Fit

Size = Annotated[str, Field(pattern=r"^[0-9]{1,5}[xX*][0-9]{1,5}$")]
BodyT = TypeVar("BodyT", bound=BaseModel)
_IMAGE = "a start picture: JPEG, PNG, WebP or AVIF as base64 (or a data: URL), in a form a file; never an address"
_ADAPTIVE = "whether it gives up steps, then frame rate, under load, before anybody is refused"
Image = Annotated[str, Field(max_length=MAX_JSON_BYTES)]
ImageFit = Annotated[Fit, Field(description="how a picture of other proportions is fitted")]


_CHANGES = ("strength", "adaptive", "fps", "steps", "lora", "prompt", "seed", "image")
"""Fields of a `SessionChange` that change something."""
_FIT_WITH_IMAGE: dict[str, Any] = {"fit": {"required": ["image"], "properties": {"image": {"type": "string"}}}}


class NewSession(Body):
    """A session to open; what is left out is the server's default (`seed`: 0)."""

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra={"dependentSchemas": _FIT_WITH_IMAGE})

    prompt: Prompt | None = None
    """what to show"""
    seed: Seed = 0
    size: Size | None = None
    """WIDTHxHEIGHT; an engine has one, GET /api/sessions tells it"""
    steps: Steps | None = None
    kv_context: KVContext | None = None
    """what a chunk sees of earlier chunks"""
    fps: Fps | None = None
    adaptive: bool | None = Field(None, description=_ADAPTIVE)
    image: Image | None = Field(None, description=_IMAGE)
    fit: ImageFit = "cover"
    strength: Strength | None = Field(
        None, description=f"noise mixed into `video_latents`, which are a file of a form; default {DEFAULT_STRENGTH}"
    )

    @model_validator(mode="after")
    def _check(self) -> NewSession:
        _check_fit(self)
        return self


class ChunkOfStream(Body):
    """A chunk of a session's stream, of those that `kept` in its state has."""

    chunk: control.Revision


class SessionChange(Body):
    """What to change while it plays; what is left out, or null, stays. Carried out in the order of the fields here."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "anyOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in _CHANGES],
            "dependentSchemas": {
                "switch": {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                **_FIT_WITH_IMAGE,
            },
        },
    )

    if_rev: control.Revision | None = None
    """only while the state has this revision, else 409"""
    strength: Strength | None = None
    """of the video that feeds it, else 422"""
    adaptive: bool | None = Field(None, description=_ADAPTIVE)
    fps: Fps | None = None
    steps: Steps | None = None
    """from the next chunk on"""
    lora: Lora | None = None
    """`name` (one of `loras_known`), `scale` from 0 to 2 (null: it is taken out), and `over` so many chunks"""
    prompt: Prompt | None = None
    """from the next chunk on"""
    switch: PromptPolicy | None = None
    """what the new prompt does to the past; null: what suits the model"""
    seed: Seed | None = None
    """restarts the stream with it"""
    image: Image | None = Field(None, description=f"restarts the stream: {_IMAGE}; empty: with none")
    fit: ImageFit | None = None

    @model_validator(mode="after")
    def _check(self) -> SessionChange:
        if "switch" in self.model_fields_set and self.prompt is None:
            raise PydanticCustomError("switch", "`switch` says how a new `prompt` comes in; give both")
        _check_fit(self)
        if all(getattr(self, name) is None for name in _CHANGES):
            known = f"{', '.join(_CHANGES[:-1])} or {_CHANGES[-1]}"
            raise PydanticCustomError("empty", f"The change is empty; give {known}")
        return self


def _check_fit(body: NewSession | SessionChange) -> None:
    if "fit" in body.model_fields_set and body.image is None:
        raise PydanticCustomError("fit", "`fit` says how an `image` is fitted; give both")


class Answer(BaseModel):
    """Base of what is answered: a field's docstring is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class InputInfo(Answer):
    """Video that feeds a session."""

    kind: str
    strength: float
    fault: str
    """why the engine takes no more of it, or empty"""


class SessionInfo(Answer):
    """An open session."""

    id: str
    prompt: str
    text: str
    """the prompt as the model was given it"""
    notice: str
    """the model's remark on the prompt, or empty"""
    seed: int
    image: bool
    """whether it begins with a picture"""
    features: list[str]
    """made elsewhere: prompt_embeds, image_latents, video_latents, poses, intrinsics"""
    input: InputInfo | None
    """the video that feeds it"""
    adaptive: bool
    """whether it gives up steps, then frame rate, under load"""
    reason: str
    """`load` while it has less than was asked for, else empty"""
    steps: int
    """denoise steps of a chunk"""
    asked_steps: int
    """those that were asked for"""
    steps_known: list[int]
    """those that `steps` may be changed to; empty: unknown"""
    kv_context: str
    loras: dict[str, float]
    """scales of the LoRAs that it has, by name"""
    loras_known: list[str]
    """names of those that `lora` may load"""
    fps: float
    """frames shown per second"""
    asked_fps: float
    """those that were asked for"""
    native_fps: float
    """frames per second at which motion looks as the model was trained"""
    width: int
    height: int
    paused: bool
    watched: bool
    place: Literal["device", "host", "disk", "none"]
    """where its caches lie: on the device, or swapped out to host memory or disk as nobody watches; none: the
    engine has not opened it yet, after a start or a restart"""
    rev: int
    """goes up with every change"""
    age_s: float
    ends_in_s: float | None
    """when it ends by itself as things are; null: never"""
    share: float
    """of the engine's time, as measured; taken while somebody watches"""
    whep: str
    """where to POST an offer to watch it"""
    control: str
    """where its control WebSocket is"""
    stats: dict[str, Any]


class OpenedSession(SessionInfo):
    """A session that was opened just now. Its tokens are shown only here."""

    view_token: str
    """lets who shows it watch, where the server has a token"""
    control_token: str
    """lets who shows it steer and end the session"""


class CapacityInfo(Answer):
    """What the engine can take."""

    free_sessions: int | None
    """further sessions of the default kind; null: nothing was measured yet"""
    work_s: float | None
    """seconds of work in a chunk, measured"""
    chunk_frames: int
    share: float
    """of the engine's time that the sessions take that somebody watches"""
    share_limit: float
    occupancy: list[float]
    """share of the time that each rank of a ring was at work"""
    sessions_fit: int | None
    """sessions of the default kind that fit into memory at once; null: unknown"""
    sessions_away: int | None
    """further sessions that may be swapped out; null: no limit"""
    places: dict[str, int]
    """open sessions, by where they lie: device, host, disk"""
    size: str
    steps: list[int]
    native_fps: float
    text_shape: list[int]
    """most rows, and width, of `prompt_embeds`; empty: the model takes none"""
    chunk_shape: list[int]
    """of a chunk's latents: channels, latent frames, height, width"""
    first_chunks: int
    """chunks that `image_latents` are of"""
    begins_with_picture: bool
    """whether a session needs an `image`"""
    controls: tuple[Control, ...]
    """what steers a session"""
    draining: bool


class SessionList(Answer):
    """The open sessions of this server that the caller may watch, oldest first."""

    server: str | None
    """the one whose sessions these are (serve.name); others have their own"""
    sessions: list[SessionInfo]
    capacity: CapacityInfo


class NewOutput(Body):
    """Where to send a session too."""

    target: str = Field(
        min_length=1,
        max_length=2000,
        description="the name of a file, as show.mp4, or an address, as rtmp://host/app/key",
    )


class OutputList(Answer):
    """The outputs that were asked for over the API."""

    outputs: list[OutputStatus]


class TimelineInfo(Answer):
    """What a session plays from now on."""

    changes: int
    """of the timeline; 0: there is none"""


class EndedSession(Answer):
    """A session that is no more."""

    id: str
    ended: str
    """why, in a word"""


class Receipts(Answer):
    """What became of a change: one receipt for each request it was made of."""

    receipts: list[dict[str, Any]]
    session: SessionInfo


def read(
    model: type[BodyT], given: Any, *, is_form: bool = False, status: int = 422, unknown: str = "invalid"
) -> BodyT:
    """A JSON value, or a form's texts, as a `model`.

    Raises:
        Problem: with `status`, the first field at fault and all of them in `errors`; its code is `unknown` for a field
            that there is not.
    """
    if not isinstance(given, dict):
        raise Problem(status, "The body is JSON, but no object with fields.", code="invalid")
    # Before pydantic, which would write of each of a million that it is wrong.
    if strange := [name for name in given if name not in model.model_fields]:
        errors = [{"field": name[:40], "message": "Extra inputs are not permitted"} for name in strange[:20]]
        detail = f"There is no field {strange[0][:40]!r}; known: {', '.join(model.model_fields)}."
        raise Problem(status, detail, code=unknown, field=strange[0][:40], errors=errors)
    try:
        return model.model_validate(given, strict=False if is_form else None)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    errors = []
    for each in problems:  # what is wrong with fields together has no place, but a type that is a field's name
        together = each["type"] if each["type"] in model.model_fields else ""
        parts = [str(part) for part in each["loc"]]  # one with a hyphen is no field: it says which type was tried
        field = ".".join(part for part in parts if "-" not in part)[:80] or together
        errors.append({"field": field, "message": each["msg"]})
    field, message = errors[0]["field"][:40], errors[0]["message"]
    detail = f"`{field}`: {message}." if problems[0]["loc"] else f"{message}."
    raise Problem(status, detail, code="invalid", field=field, errors=errors[:20])


def is_size_of(size: str, ready: Ready) -> bool:
    """Whether a `Size` is the engine's."""
    return size.lower().replace("*", "x") == f"{ready.width}x{ready.height}"


def check_new(wanted: NewSession, ready: Ready) -> None:
    """Raises Problem 422 for a size or steps that the engine does not have."""
    if wanted.size is not None and not is_size_of(wanted.size, ready):
        why = f"`size` is {wanted.size[:20]!r}; this engine makes {ready.width}x{ready.height}."
        raise Problem(422, why, code="invalid", field="size")
    _check_steps(wanted.steps, ready)


def _check_steps(steps: int | None, ready: Ready) -> None:
    if steps is not None and (why := control.steps_refusal(steps, ready)):
        raise Problem(422, why, code="invalid", field="steps")


def messages_of(change: SessionChange, ready: Ready, picture: Pictures | None = None) -> list[control.ControlMessage]:
    """The control messages that a change is made of, in their order; `picture` is its decoded `image`.

    Raises:
        Problem: 422 for steps that the engine does not have.
    """
    _check_steps(change.steps, ready)
    settings = {name: getattr(change, name) for name in ("strength", "adaptive", "fps", "steps")}
    messages: list[control.ControlMessage] = [
        control.MESSAGES[name].model_validate({"type": name, name: value})
        for name, value in settings.items()
        if value is not None
    ]
    if change.lora is not None:
        messages.append(control.LoraMessage(type="lora", **asdict(change.lora)))
    if change.prompt is not None:
        messages.append(control.PromptMessage(type="prompt", prompt=change.prompt, switch=change.switch))
    if change.image is not None:
        messages.append(control.PictureReset(type="reset", seed=change.seed, picture=picture))
    elif change.seed is not None:
        messages.append(control.ResetMessage(type="reset", seed=change.seed))
    # The revision goes up with the first of them, so only that one can ask for it.
    return [messages[0].model_copy(update={"if_rev": change.if_rev}), *messages[1:]]
