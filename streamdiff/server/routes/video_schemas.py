"""Bodies of `/v1/videos`, as JSON or as a form, and what the answers look like. No field is ever ignored."""

from __future__ import annotations

import json
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
from streamdiff.server.sessions.control import Fps, Prompt, Seed, Steps, Strength, steps_refusal
from streamdiff.video.picture import Fit

DEFAULT_SECONDS = 4.0
PICTURE = "input_reference"
REFERENCES = ("image_reference", "reference_url", "video_reference")

_Side = Annotated[int, Field(ge=1, le=99_999)]


class NewVideo(BaseModel):
    """A video to make; what is left out is the server's choice. `extra_body`, an object, is read as more fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Prompt | None = Field(None, description="what to show; needed, unless `prompt_embeds` come instead")
    model: str | None = Field(None, max_length=200, description="the one that /v1/models lists")
    seconds: (
        Annotated[float, Field(gt=0, le=86_400)] | Annotated[str, Field(pattern=r"^[0-9]{1,5}(\.[0-9]{1,3})?$")] | None
    ) = Field(None, description=f"length, default {DEFAULT_SECONDS:g}")
    size: Size | None = Field(None, description="WIDTHxHEIGHT; an engine has one")
    width: _Side | None = None
    height: _Side | None = None
    seed: Seed | None = Field(None, description="default: one that nobody knows; the answer tells it")
    fps: Fps | None = Field(None, description="default: the model's own")
    num_frames: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(None, description="length in frames")
    num_inference_steps: Steps | None = None
    input_reference: Annotated[str, Field(max_length=MAX_JSON_BYTES)] | None = Field(
        None,
        description="a picture that it begins with: a file of a form, or base64; JPEG, PNG, WebP or AVIF, no address",
    )
    fit: Fit = Field("cover", description="how a picture of other proportions is fitted")
    strength: Strength | None = Field(
        None, description=f"noise mixed into `video_latents`, which are a file of a form; default {DEFAULT_STRENGTH}"
    )


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
    error: VideoError | None
    remixed_from_video_id: None = None


class VideoList(BaseModel):
    """Videos, in the order asked for."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


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
        made = _validated(_flat(form), strict=False, embeds="prompt_embeds" in files)
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
    made = _validated(_flat(fields), strict=True)
    return made, _picture(made, None), {}


def _picture(made: NewVideo, file: bytes | str | None) -> bytes | str | None:
    """The picture of a request, its form's file or base64. Raises Problem: 400 for a `fit` without one."""
    picture = made.input_reference if file is None else file
    if picture is None and "fit" in made.model_fields_set:
        _invalid("fit", f"`fit` says how `{PICTURE}` is fitted; give both.")
    return picture


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


def _validated(fields: Mapping[str, Any], *, strict: bool, embeds: bool = False) -> NewVideo:
    """The fields; of a request with `embeds`, which stand for the prompt, without one. Raises Problem 400."""
    for name in REFERENCES:
        if fields.get(name) is not None:
            _refuse(name)
    if not embeds and fields.get("prompt") is None:
        _invalid("prompt", "`prompt` is missing.")
    if unknown := next((name for name in fields if name not in NewVideo.model_fields), None):
        _refuse(unknown[:40])  # before pydantic writes of each one that it is wrong
    try:
        return NewVideo.model_validate(fields, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = str(first["loc"][0])[:40] if first["loc"] else ""
    _invalid(name, f"`{name}`: {first['msg']}.")


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


def resolve(wanted: NewVideo, ready: Ready, limit_s: float, names: frozenset[str]) -> VideoRequest:
    """All that a video needs, for an engine that is called by any of `names`. No longer than `limit_s` at the model's
    own rate.

    Raises:
        Problem: 400 naming the field that the engine cannot do, 404 for another model.
    """
    if wanted.model is not None and wanted.model not in names:
        why = f"There is no model {wanted.model[:80]!r} here; /v1/models lists {ready.model!r}."
        raise Problem(404, why, code="model_not_found", field="model")
    size = f"{ready.width}x{ready.height}"
    if wanted.size is not None and wanted.size.replace("*", "x") != size:
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
    seed = secrets.randbelow(MAX_SEED + 1) if wanted.seed is None else wanted.seed
    return VideoRequest(ready.model, wanted.prompt or "", seed, steps, frames, fps, ready.width, ready.height)


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
        error=VideoError(code="failed", message=job.error) if job.status == "failed" else None,
    )
