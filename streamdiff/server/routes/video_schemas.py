"""Bodies of `/v1/videos`, as JSON or as a form, and what the answers look like. No field that would change the video is
ever ignored."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from streamdiff.engine.messages import DEFAULT_STRENGTH, Ready
from streamdiff.engine.validation import MAX_SEED
from streamdiff.server.jobs.job import Job, VideoRequest
from streamdiff.server.problem import Problem, media_type, read_body
from streamdiff.server.routes.dependencies import JSON
from streamdiff.server.routes.forms import FORM, MAX_JSON_BYTES, URLENCODED, Fields, read_form, take_features
from streamdiff.server.routes.schemas import Size
from streamdiff.server.sessions.control import Fps, Prompt, Steps, Strength, steps_refusal
from streamdiff.video.picture import Fit

DEFAULT_SECONDS = 4.0
PICTURE = "input_reference"
REFERENCES = ("image_reference", "reference_url", "video_reference")
UNUSED = ("user", "metadata")
"""Fields that clients send and that change no video."""
MAX_KEY_CHARACTERS = 255

_Side = Annotated[int, Field(ge=1, le=99_999)]
_NESTED = re.compile(r"([a-z_]{1,40})\[([^\]]{0,40})\].*", re.DOTALL)
"""A field of an object, as clients write it into a form: `input_reference[image_url]`."""
_ADDRESS: dict[str, Any] = {
    "type": "object",
    "properties": {"image_url": {"type": "string", "description": "a data: URL of base64"}},
    "required": ["image_url"],
}


def _as_clients_write(schema: dict[str, Any]) -> None:
    """Numbers may be text, what is empty counts as left out, and a picture may be an object. Mutates: schema."""
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf", ())
        if any(kind.get("type") in ("integer", "number") for kind in kinds):
            kinds.append({"type": "string"})
        elif kinds and name != "prompt":
            kinds.append({"const": ""})
    schema["properties"][PICTURE]["anyOf"].append(_ADDRESS)
    schema["additionalProperties"] = {"enum": [None, ""]}


class NewVideo(BaseModel):
    """A video to make; what is left out is the server's choice. `extra_body`, an object, is read as more fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_as_clients_write)

    prompt: Prompt | None = Field(None, description="what to show; needed, unless `prompt_embeds` come instead")
    model: str | None = Field(None, max_length=200, description="the one that /v1/models lists")
    seconds: (
        Annotated[float, Field(gt=0, le=86_400)] | Annotated[str, Field(pattern=r"^[0-9]{1,5}(\.[0-9]{1,3})?$")] | None
    ) = Field(None, description=f"length, default {DEFAULT_SECONDS:g}")
    size: Size | None = Field(None, description="WIDTHxHEIGHT; an engine has one")
    width: _Side | None = None
    height: _Side | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = Field(
        None, description="default, or -1: any; the answer has it"
    )
    fps: Fps | None = Field(None, description="default: the model's own")
    num_frames: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(None, description="length in frames")
    num_inference_steps: Steps | None = None
    input_reference: Annotated[str, Field(max_length=MAX_JSON_BYTES)] | None = Field(
        None,
        description="a picture that it begins with: a file of a form, or base64; JPEG, PNG, WebP or AVIF, no address",
    )
    fit: Fit | None = Field(None, description="how a picture of other proportions is fitted; default cover")
    strength: Strength | None = Field(
        None, description=f"noise mixed into `video_latents`, which are a file of a form; default {DEFAULT_STRENGTH}"
    )
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description="videos: one for a request")
    user: Any = Field(None, description="has no effect")
    metadata: Any = Field(None, description="has no effect")


class VideoError(BaseModel):
    """Why a video could not be made."""

    code: str
    message: str


class Video(BaseModel):
    """A video that is asked for, made, or kept."""

    id: str
    object: Literal["video"] = "video"
    model: str
    prompt: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(description="per cent of the frames that are encoded")
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None = Field(description="when it and its file are forgotten")
    seconds: str
    size: str
    fps: float
    num_frames: int
    num_inference_steps: int
    seed: int
    inference_time_s: float | None = Field(description="seconds from its beginning to its last frame")
    peak_memory_mb: float | None = Field(
        description="MiB that the engine took meanwhile, at most: of the first rank's GPU, or without one in all"
    )
    error: VideoError | None
    remixed_from_video_id: None = None


class VideoList(BaseModel):
    """Videos, in the order asked for."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool
    server: str | None = Field(description="the one whose videos these are (serve.name); others have their own")


class DeletedVideo(BaseModel):
    """A video that is no more."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class ServedModel(BaseModel):
    """The model that is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["streamdiff"] = "streamdiff"


class ModelList(BaseModel):
    """All models of this server: one."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


async def read_new_video(request: Request, ready: Ready) -> tuple[NewVideo, bytes | str | None, Fields]:
    """The body of a request, JSON or a form, the picture in it, a file's bytes or base64, and files of features.

    Raises:
        Problem: 400 naming the field, 413, 415; 422 for features that the model does not take.
    """
    kind = media_type(request)
    if kind in (FORM, URLENCODED):
        form = await read_form(request, kind, (PICTURE,), _fault, ready)
        files = take_features(form)
        file = form.pop(PICTURE) if isinstance(form.get(PICTURE), bytes) else None
        made = _validated(_flat(_nested(form)), embeds="prompt_embeds" in files)
        if file is not None and made.input_reference is not None:
            _invalid(PICTURE, f"`{PICTURE}` stands in the form and in `extra_body`; one would be ignored.")
        return made, _picture(made, file), files
    given = await read_body(request, MAX_JSON_BYTES)
    if kind != JSON:
        raise Problem(415, f"The body is {JSON} or {FORM}.", code="media_type")
    try:
        fields = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"The body is not JSON: {str(error)[:120]}.", code="bad_json") from error
    if not isinstance(fields, dict):
        raise Problem(400, "The body is JSON, but no object: give fields, such as `prompt`.", code="bad_json")
    made = _validated(_flat(fields))
    return made, _picture(made, None), {}


def _picture(made: NewVideo, file: bytes | str | None) -> bytes | str | None:
    """The picture of a request, its form's file or base64. Raises Problem: 400 for a `fit` without one."""
    picture = made.input_reference if file is None else file
    if picture is None and made.fit is not None:
        _invalid("fit", f"`fit` says how `{PICTURE}` is fitted; give both.")
    return picture


def _nested(form: Fields) -> dict[str, Any]:
    """A form's fields, with objects where their names say so."""
    fields: dict[str, Any] = {}
    for name, value in form.items():
        found = _NESTED.fullmatch(name)
        if found is None:
            fields[name] = value
        elif isinstance(inner := fields.setdefault(found[1], {}), dict):
            inner[found[2]] = value
        else:
            _invalid(found[1], f"`{found[1]}` is given twice, as `{found[1]}` and as `{name[:40]}`; give it once.")
    return fields


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with those of `extra_body` among them.

    Raises:
        Problem: 400 for an `extra_body` that is no object, or that says again what a field says.
    """
    given = dict(fields)
    extra = given.pop("extra_body", None)
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except (ValueError, RecursionError):
            _invalid("extra_body", "`extra_body` is not JSON.")
    if extra is None:
        return given
    if not isinstance(extra, dict):
        _invalid("extra_body", "`extra_body` is no object: give fields in it.")
    if twice := sorted(extra.keys() & given.keys()):
        _invalid(twice[0], f"`{twice[0][:40]}` stands in the body and in `extra_body`; one would be ignored.")
    return given | extra


def _validated(given: Mapping[str, Any], *, embeds: bool = False) -> NewVideo:
    """The fields that are not empty; of a request with `embeds`, which stand for the prompt, without one. Raises
    Problem 400."""
    fields = {name: value for name, value in given.items() if value is not None and value != ""}
    for name in REFERENCES:
        if name in fields:
            _refuse(name)
    if PICTURE in fields:
        fields[PICTURE] = _reference(fields[PICTURE])
    if not embeds and "prompt" not in fields:
        _invalid("prompt", "`prompt` is missing.")
    if unknown := next((name for name in fields if name not in NewVideo.model_fields), None):
        _refuse(unknown[:40])  # before pydantic writes of each one that it is wrong
    if flag := next((name for name, value in fields.items() if isinstance(value, bool) and name not in UNUSED), None):
        _invalid(flag, f"`{flag}` is {json.dumps(fields[flag])}; it must be a number or a text.")  # not 1 or 0
    try:
        return NewVideo.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = str(first["loc"][0])[:40] if first["loc"] else ""
    _invalid(name, f"`{name}`: {first['msg']}.")


def _reference(given: Any) -> Any:
    """What `input_reference` is as base64, given as that or as an object, also one as JSON."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            _invalid(PICTURE, f'`{PICTURE}` is no JSON; give base64, or {{"image_url": "data:..."}}.')
    if not isinstance(given, dict):
        return given
    said = {name: value for name, value in given.items() if value is not None and value != ""}
    if said.keys() != {"image_url"} or not isinstance(said["image_url"], str):
        names = ", ".join(sorted(said))[:80] or "nothing"
        why = f"`{PICTURE}` has {names}; as an object it has `image_url` alone, a data: URL of base64."
        _invalid(PICTURE, why, "unsupported")
    return said["image_url"]


def _refuse(name: str) -> NoReturn:
    """A field that nothing here reads."""
    if name in REFERENCES:
        _invalid(name, f"`{name}` cannot be used: a video begins with a picture, `{PICTURE}`, or none.", "unsupported")
    known = ", ".join(NewVideo.model_fields)
    _invalid(name, f"`{name[:40]}` would be ignored, so it is refused. What can be said: {known}.", "unsupported")


def _invalid(name: str, why: str, code: str = "invalid") -> NoReturn:
    raise _fault(name, why, code)


def _fault(name: str, why: str, code: str) -> Problem:
    return Problem(400, why, code=code, field=name[:40])


def check_model(name: str, ready: Ready, configured: str) -> None:
    """Raises Problem 404 for a name that is neither the model's own nor the one that it was `configured` by."""
    if name not in (ready.model, configured):
        why = f"There is no model {name[:80]!r} here; /v1/models lists {ready.model!r}."
        raise Problem(404, why, code="model_not_found", field="model")


def resolve(wanted: NewVideo, ready: Ready, limit_s: float, configured: str) -> VideoRequest:
    """All that a video needs, for an engine, see `check_model`. No longer than `limit_s` at the model's own rate.

    Raises:
        Problem: 400 naming the field that the engine cannot do, 404 for another model.
    """
    if wanted.model is not None:
        check_model(wanted.model, ready, configured)
    size = f"{ready.width}x{ready.height}"
    if wanted.size is not None and wanted.size.lower().replace("*", "x") != size:
        _invalid("size", f"`size` is {wanted.size!r}; this engine makes {size}.")
    for name, value, own in (("width", wanted.width, ready.width), ("height", wanted.height, ready.height)):
        if value is not None and value != own:
            _invalid(name, f"`{name}` is {value}; this engine makes {size}.")
    steps = ready.steps if wanted.num_inference_steps is None else wanted.num_inference_steps
    if wanted.num_inference_steps is not None and (why := steps_refusal(steps, ready)):
        _invalid("num_inference_steps", why.replace("`steps`", "`num_inference_steps`"))
    fps = ready.native_fps if wanted.fps is None else wanted.fps
    frames = _frames(wanted, fps)
    if frames > (most := round(limit_s * ready.native_fps)):
        name = "seconds" if wanted.num_frames is None else "num_frames"
        _invalid(name, f"That is {frames:,} frames; this server makes {most:,} at most (serve.jobs_seconds).")
    seed = secrets.randbelow(MAX_SEED + 1) if wanted.seed is None or wanted.seed < 0 else wanted.seed
    return VideoRequest(ready.model, wanted.prompt or "", seed, steps, frames, fps, ready.width, ready.height)


def idempotency(request: Request, caller: str, wanted: NewVideo, *parts: bytes | str | None) -> tuple[str, str] | None:
    """What a store knows a request with an `Idempotency-Key` by, and the rest of it: digests of the key of this caller,
    and of its fields and files. None: it has no key. Raises Problem 400 for one that is too long, or not ASCII."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        why = f"`Idempotency-Key` has {len(key)} characters; it must be 1 to {MAX_KEY_CHARACTERS}, of printable ASCII."
        _invalid("Idempotency-Key", why)
    # A form says 4 as text, and has the picture as a file.
    same = wanted if wanted.seconds is None else wanted.model_copy(update={"seconds": float(wanted.seconds)})
    fields = same.model_dump_json(exclude_defaults=True, exclude={PICTURE, *UNUSED}).encode()
    return _digest(caller, key), _digest(fields, *parts)


def _digest(*parts: bytes | str | None) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part.encode() if isinstance(part, str) else part or b"").digest())
    return whole.hexdigest()


def _frames(wanted: NewVideo, fps: float) -> int:
    seconds = None if wanted.seconds is None else float(wanted.seconds)
    if seconds is not None and seconds <= 0:
        _invalid("seconds", "`seconds` is 0; it must be above 0.")
    if wanted.num_frames is None:
        return max(1, round((DEFAULT_SECONDS if seconds is None else seconds) * fps))
    if seconds is not None and abs(wanted.num_frames - seconds * fps) >= max(1.0, fps):
        _invalid(
            "seconds",
            f"`seconds` is {seconds:g}, but {wanted.num_frames} frames at {fps:g} per second are "
            f"{wanted.num_frames / fps:g} s; leave one of them out.",
        )
    return wanted.num_frames


def video_of(job: Job, progress: int) -> Video:
    """A job as the API shows it."""
    request = job.request
    times_s = (job.started_s, job.ended_s, job.expires_s)
    started, ended, expires = (None if time_s is None else int(time_s) for time_s in times_s)
    return Video(
        id=job.id,
        model=request.model,
        prompt=request.prompt,
        status=job.status,
        progress=progress,
        created_at=int(job.created_s),
        started_at=started,
        completed_at=ended,
        expires_at=expires,
        seconds=f"{request.frames / request.fps:g}",
        size=f"{request.width}x{request.height}",
        fps=request.fps,
        num_frames=request.frames,
        num_inference_steps=request.steps,
        seed=request.seed,
        inference_time_s=job.inference_s,
        peak_memory_mb=job.peak_memory_mb,
        error=VideoError(code="failed", message=job.error) if job.status == "failed" else None,
    )
