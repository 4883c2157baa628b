"""Control messages, from data channels, WebSockets and HTTP alike: what they are, their parsing, and their receipts,
which say how far each request has come.

The models below check messages and make the API's description; the bodies of `/api/sessions` share their field types.
A message is checked whole before anything changes. Pure: knows nothing about sockets, the engine or the clock.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args

import psutil
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from streamdiff.core import PromptPolicy, control_values
from streamdiff.engine.messages import Pictures, Ready
from streamdiff.engine.timeline import LoraName, LoraScale, Over
from streamdiff.engine.validation import MAX_PROMPT_CHARACTERS, MAX_SEED
from streamdiff.errors import RequestError
from streamdiff.server.load import LoadLimit, ViewerDemand
from streamdiff.server.problem import Problem, Unavailable

MAX_MESSAGE_BYTES, MAX_BODY_BYTES = 16 * 1024, 256 * 1024
LARGEST_SNAPSHOT_BYTES = psutil.virtual_memory().total // 8
"""Of a saved session that is sent to go on here."""
MESSAGES_PER_S, CONTROLS_PER_S = 50, 120
"""Of one connection; messages that hold controls count for themselves."""
MAX_CONTROLS = 64

MAX_ID_CHARACTERS, MAX_NAME_CHARACTERS = 64, 24
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


def _clean_name(value: str) -> str:
    """A name without white space around it; nothing in it moves or hides the text beside it."""
    kinds = [unicodedata.category(character) for character in value if character != "\u200d"]  # joins emojis
    if not value.strip() or {"Cc", "Cf", "Co", "Zl", "Zp"}.intersection(kinds):
        raise PydanticCustomError("name", "a name has letters, and no control characters")
    return " ".join(value.split())


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS), AfterValidator(_clean_name)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS, description="denoise steps of a chunk, of those the model has")]
Strength = Annotated[float, Field(gt=0, le=1, description="near 0: the video as it is; 1: the prompt alone")]
ControlName = Annotated[str, Field(min_length=1, max_length=64)]
Axis = Annotated[float, Field(ge=-1, le=1)]
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
    over: Over = Field(1, description="chunks over which it comes")
    along: Literal["line", "sphere"] = Field("line", description="how embeddings are mixed meanwhile")


class ResetMessage(ChangeMessage):
    """Start over."""

    type: Literal["reset"]
    seed: Seed | None = Field(None, description="left out: the session's")


class RewindMessage(ChangeMessage):
    """Go back to an earlier chunk, of those that `kept` in the state has, and on from there."""

    type: Literal["rewind"]
    chunk: Revision


class PictureReset(ResetMessage):
    """Start over from a picture, or with None from none; over HTTP alone, as messages are small."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    picture: SkipValidation[Pictures | None]


class StepsMessage(ChangeMessage):
    """Make chunks in so many steps, from the next one on."""

    type: Literal["steps"]
    steps: Steps


class LoraMessage(ChangeMessage):
    """Have a LoRA of the server (`loras_known` in the state), from the next chunk on; others stay as they are."""

    type: Literal["lora"]
    name: LoraName
    scale: LoraScale = Field(1.0, description="null: it is taken out")
    over: Over = Field(1, description="chunks over which the scale changes")


class StrengthMessage(ChangeMessage):
    """Mix so much noise with the video that feeds the session."""

    type: Literal["strength"]
    strength: Strength


class ControlsMessage(ChangeMessage):
    """Hold controls of the model (`controls` in the state) from the next chunk on; others stay as they are."""

    type: Literal["control"]
    axes: dict[ControlName, Axis] = Field({}, max_length=MAX_CONTROLS, description="-1 to 1; 0: let go")
    buttons: dict[ControlName, bool] = Field({}, max_length=MAX_CONTROLS)
    t: float | None = Field(None, description="the client's time, said again in receipts")

    @property
    def values(self) -> dict[str, float]:
        """Of axes and buttons, by name."""
        return self.axes | {name: float(pressed) for name, pressed in self.buttons.items()}


class FpsMessage(ChangeMessage):
    """Show so many frames per second."""

    type: Literal["fps"]
    fps: Fps


class AdaptiveMessage(ChangeMessage):
    """Under load, give up steps and then frame rate, or do not."""

    type: Literal["adaptive"]
    adaptive: bool


class HoldMessage(ChangeMessage):
    """Hold the stream, or let it go on."""

    type: Literal["pause", "resume"]


class WheelMessage(_Message):
    """Have the wheel or wait for it, or give it up; the rest is for the session's owner, over HTTP: take it back, pass
    it to a watcher, remove one, open it to those who may only watch, or close it to them."""

    type: Literal["wheel"] = "wheel"
    do: Literal["take", "give_up", "take_back", "pass", "remove", "open", "close"]
    name: Name | None = Field(None, description="what others see; left out: as before, or a number")
    watcher: Revision | None = Field(None, description="whom `pass` and `remove` are about")


class AskMessage(_Message):
    """Tell the state, or just answer."""

    type: Literal["get", "ping"]


ControlMessage = (
    PromptMessage
    | ResetMessage
    | RewindMessage
    | StepsMessage
    | StrengthMessage
    | LoraMessage
    | ControlsMessage
    | FpsMessage
    | AdaptiveMessage
    | HoldMessage
    | WheelMessage
    | AskMessage
)
MESSAGES: dict[str, type[ControlMessage]] = {
    kind: model for model in get_args(ControlMessage) for kind in get_args(model.model_fields["type"].annotation)
}
"""The models of control messages by their `type`."""


_ID: TypeAdapter[Id] = TypeAdapter(Id)


class ControlError(Problem):
    """A message that is refused: a code for programs, a sentence for people, the field at fault. With `headers`, which
    say when to ask again, it may be carried out later."""

    def __init__(
        self, code: str, message: str, field: str = "", id: Id = None, headers: dict[str, str] | None = None
    ) -> None:
        known = {"bad_json": 400, "bad_message": 400, "conflict": 409, "fed": 409, "wheel": 409, "forbidden": 403}
        super().__init__(503 if headers else known.get(code, 422), message, headers, code=code, field=field, id=id)
        self.field, self.id = field, id


def message_schema() -> dict[str, Any]:
    """JSON schema of a control message."""
    return {"oneOf": [model.model_json_schema() for model in get_args(ControlMessage)]}


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
    kind, id = message.get("type"), None
    with suppress(ValidationError):  # a message that is wrong is answered with its id, if that is not wrong itself
        id = _ID.validate_python(message.get("id"), strict=True)
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


def _refusal(kind: str, fault: ErrorDetails, id: Id) -> ControlError:
    """The first thing that is wrong with a message, in our words."""
    field = str(fault["loc"][0])[:40]
    code = "bad_prompt" if field == "prompt" else "out_of_range"
    if fault["type"] == "missing":
        return ControlError(code, f"A {kind} message needs `{field}`.", field, id)
    return ControlError(code, f"`{field}` is {_echo(fault['input'])}: {fault['msg']}.", field, id)


def check_value(message: ControlMessage, ready: Ready, switches: Sequence[str], fed: bool) -> None:
    """Raises ControlError for what the model cannot do, or a session that can do `switches` and is `fed` with video, or
    not."""
    match message:
        case StepsMessage(steps=steps) if why := steps_refusal(steps, ready):
            raise ControlError("out_of_range", why, "steps", message.id)
        case StrengthMessage() if not fed:
            raise ControlError("no_input", "No video feeds the session; send one by WHIP.", "strength", message.id)
        case PromptMessage(switch=switch) if switch is not None and switch not in switches:
            why = f"`switch` is {switch!r}; this session can do {', '.join(switches)}."
            raise ControlError("out_of_range", why, "switch", message.id)
        case ControlsMessage(values=values):
            try:
                control_values(ready.controls, values)
            except RequestError as error:
                raise ControlError(error.code, str(error), error.field, message.id) from error


def steps_refusal(steps: int, ready: Ready) -> str:
    """Why chunks cannot have so many steps; "" where they can, or the engine has not said which."""
    if not ready.steps_known or steps in ready.steps_known:
        return ""
    return f"`steps` is {_echo(steps)}; the model {ready.model} has {', '.join(map(str, ready.steps_known))}."


def _echo(value: Any) -> str:
    return repr(value)[:42]


# ---- what callers read ----------------------------------------------------------------------------------------

Stage = Literal["asked", "accepted", "applied", "shown", "superseded", "refused"]
LOAD = "load"
"""Owner of requests that are made by the load limits, whose receipts go to all peers; also their reason."""

PLAIN_REASON = "it failed; controllers see why"
_WORDS = {
    "opening": "The session is not open yet",
    "restarting": "The engine is being started again",
    "waiting": "The session waits for memory",
    "failed": "The engine stopped",
}


class StreamEnded(Problem):
    """The session ended before it answered."""

    def __init__(self, session: str) -> None:
        super().__init__(410, f"The session {session!r} has ended.", code="ended")


@dataclass(frozen=True)
class EngineStatus:
    """State of the engine, or of a session on it: `opening`, or `waiting` for memory to be opened again. `reason`: why
    it does not run; `retry_after_s`: in how many seconds it may, as far as known.

    A reason may end with the last lines that the engine wrote: paths, addresses, what an exception held. Only callers
    that may control a session get it; others learn only that the engine failed.
    """

    state: Literal["running", "opening", "restarting", "waiting", "failed"] = "running"
    reason: str = ""
    retry_after_s: int = 1

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def code(self) -> str:
        """For programs, of an engine that does not run."""
        return {"failed": "engine", "waiting": "memory"}.get(self.state, self.state)

    def reason_for(self, may_control: bool) -> str:
        """The reason that a caller may see; empty where there is none."""
        return self.reason if may_control or not self.reason or self.state == "waiting" else PLAIN_REASON

    def message(self, may_control: bool, consequence: str = "") -> str:
        """A sentence on an engine that does not run, and why."""
        reason = self.reason_for(may_control)
        return f"{_WORDS[self.state]}{consequence}{f': {reason}' if reason else '.'}"

    def unavailable(self, may_control: bool = True) -> Unavailable:
        """The answer of an engine that does not run."""
        return Unavailable(self.code, self.message(may_control), self.retry_after_s)


def demand_after(demand: ViewerDemand, message: ControlMessage) -> ViewerDemand:
    """The session's demand after `message` is carried out; unchanged by messages other than steps, fps, adaptive."""
    changed = message.model_dump(include={"steps", "fps", "adaptive"})
    return replace(demand, **changed)


def load_limited_fields(message: ControlMessage, limit: LoadLimit) -> dict[str, Any]:
    """Additional receipt fields of a request that the load limit reduces: the value in force and reason `load`; else
    empty."""
    match message:
        case StepsMessage(steps=requested) if (steps := limit.steps_of(requested)) < requested:
            return {"steps": steps, "reason": LOAD}
        case FpsMessage(fps=requested) if (fps := limit.fps_of(requested)) < requested:
            return {"fps": fps, "reason": LOAD}
    return {}


@dataclass(frozen=True)
class Receipt:
    """How far a request has come. `lag_s` counts from its arrival, `begun_s`; `frame` is the first frame that obeys it,
    of chunk `chunk`, and `pts` its presentation time on the stream's media clock, in 90 kHz ticks. `steps` and `fps`,
    with the reason `load`: what holds, as it is less than was asked for."""

    request: str
    owner: str
    control: ControlMessage
    begun_s: float
    stage: Stage = "asked"
    lag_s: float = 0.0
    epoch: int | None = None
    frame: int | None = None
    chunk: int | None = None
    pts: int | None = None
    text: str = ""
    notice: str = ""
    field: str = ""
    reason: str = ""
    steps: int | None = None
    fps: float | None = None

    @property
    def about(self) -> str:
        """What it changes: a later request for the same replaces it."""
        return f"lora {self.control.name}" if isinstance(self.control, LoraMessage) else self.control.type

    def at(self, stage: Stage, now_s: float, **more: Any) -> Receipt:
        """The receipt of a stage that is reached now."""
        return replace(self, stage=stage, lag_s=max(0.0, now_s - self.begun_s), **more)

    def message(self) -> dict[str, Any]:
        """The JSON message for viewers, without unset fields."""
        said: Any = self.control
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"lag_s": round(self.lag_s, 4)}
        values |= {name: getattr(said, name, None) for name in ("t", "switch")}
        hidden = ("owner", "control", "begun_s")
        known = {name: value for name, value in values.items() if value not in (None, "") and name not in hidden}
        return {"type": "receipt", "id": said.id, "kind": said.type} | known


class RequestTracker:
    """Follows requests from their arrival until their first frame is shown. Sans-IO; the caller gives the time.

    Holds at most `limit` open requests; the oldest is forgotten first.
    """

    def __init__(self, limit: int = 256) -> None:
        self._open: dict[str, Receipt] = {}
        self._limit = limit
        self._count = 0

    def begin(self, control: ControlMessage, owner: str, now_s: float, **less: Any) -> str:
        """Register a request; returns its name. `less`: receipt fields where load reduces what it requests. Mutates:
        self."""
        self._count += 1
        name = f"r{self._count}"
        if len(self._open) >= self._limit:
            self.forget(next(iter(self._open)))
        self._open[name] = Receipt(name, owner, control, now_s, **less)
        return name

    @property
    def unanswered(self) -> int:
        """Requests that were neither accepted nor refused yet."""
        return sum(request.epoch is None for request in self._open.values())

    def find(self, name: str) -> ControlMessage | None:
        """The message of the request of that name, while it is open."""
        request = self._open.get(name)
        return request.control if request is not None else None

    def forget(self, name: str) -> Receipt | None:
        """Stop following a request. Mutates: self."""
        return self._open.pop(name, None)

    def accepted(self, name: str, epoch: int, text: str, notice: str, now_s: float) -> list[Receipt]:
        """The engine took it. Mutates: self."""
        if name not in self._open:
            return []
        request = self._open[name] = replace(self._open[name], epoch=epoch)
        return [request.at("accepted", now_s, text=text, notice=notice)]

    def refused(self, name: str, field: str, reason: str, now_s: float) -> list[Receipt]:
        """The engine did not take it. Mutates: self."""
        request = self.forget(name)
        if request is None:
            return []
        return [request.at("refused", now_s, field=field, reason=reason, steps=None, fps=None)]

    def engine_lost(self, epoch: int | None, made_frames: int, reason: str, now_s: float) -> list[Receipt]:
        """The engine has ended; frames before `made_frames` have come and will be shown. Requests not accepted are
        refused. Of accepted ones without a frame yet, the latest of each kind holds for the stream that restarts with
        `epoch`; None: there is no restart, and all are refused. Mutates: self."""
        ahead = [each for each in self._open.values() if each.frame is None or each.frame >= made_frames]
        lasting = [each for each in ahead if each.epoch is not None and not self._is_replaced(each)]
        receipts = []
        for request in ahead:
            if request.epoch is None or epoch is None or request.control.type == "control":
                self._open[request.request] = replace(request, frame=None, chunk=None)
                receipts += self.refused(request.request, "", reason, now_s)
            else:
                carried = epoch if request in lasting else request.epoch
                self._open[request.request] = replace(request, epoch=carried, frame=None, chunk=None)
        return receipts

    def applied(self, epoch: int, first_frame: int, now_s: float, chunk: int = 0) -> list[Receipt]:
        """The first chunk of `epoch` is made. It applies older requests too that were not applied yet, except those
        that a later one replaced. Mutates: self."""
        taken = [
            each
            for each in self._open.values()
            if each.frame is None and each.epoch is not None and each.epoch <= epoch and each.control.type != "control"
        ]
        replaced = [each for each in taken if self._is_replaced(each, epoch)]
        receipts = []
        for request in taken:
            if request in replaced:
                self.forget(request.request)
                receipts.append(request.at("superseded", now_s))
            else:
                request = self._open[request.request] = replace(request, frame=first_frame, chunk=chunk)
                receipts.append(request.at("applied", now_s))
        return receipts

    def controls_applied(self, names: Sequence[str], first_frame: int, now_s: float, chunk: int) -> list[Receipt]:
        """The first chunk that has the controls of these requests is made. Mutates: self."""
        for name in names:
            if name in self._open:
                self._open[name] = replace(self._open[name], frame=first_frame, chunk=chunk)
        return [self._open[name].at("applied", now_s) for name in names if name in self._open]

    def shown(self, frame: int, epoch: int, now_s: float, pts: int = 0) -> list[Receipt]:
        """Frame number `frame` of `epoch` is on show, with presentation time `pts`. Mutates: self."""
        reached = [each for each in self._open.values() if each.frame is not None and frame >= each.frame]
        receipts = [
            each.at("superseded", now_s) if self._is_replaced(each, epoch) else each.at("shown", now_s, pts=pts)
            for each in reached
        ]
        for request in reached:
            self.forget(request.request)
        return receipts

    def _is_replaced(self, request: Receipt, epoch: int | None = None) -> bool:
        """Whether a later request, of those up to `epoch`, replaced this one, which was accepted: one of the same
        kind, or a reset or rewind a prompt. Requests of other kinds do not affect each other."""
        mine, kind = request.epoch or 0, request.about
        return kind != "control" and any(
            other.epoch is not None
            and mine < other.epoch
            and (epoch is None or other.epoch <= epoch)
            and (other.about == kind or (kind == "prompt" and other.control.type in ("reset", "rewind")))
            for other in self._open.values()
        )
