"""`/v1/videos` and `/v1/models`: videos as jobs, in the words that clients of OpenAI's video API speak. No field that
would change the video is ever ignored."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from streamdiff.engine.messages import DEFAULT_STRENGTH, Ready
from streamdiff.engine.validation import MAX_SEED
from streamdiff.server.app_state import AppState
from streamdiff.server.auth import Role
from streamdiff.server.jobs import runner, store
from streamdiff.server.jobs.runner import JobRunner
from streamdiff.server.jobs.store import Job, VideoRequest
from streamdiff.server.peers import address_of
from streamdiff.server.problem import Problem
from streamdiff.server.routes import bodies
from streamdiff.server.routes.bodies import FORM, JSON, URLENCODED
from streamdiff.server.routes.dependencies import BINARY, FEATURES, State, answer, json_or_form, operation, problems
from streamdiff.server.routes.schemas import Answer, Size, is_size_of, read
from streamdiff.server.sessions.control import Fps, Prompt, Steps, Strength, steps_refusal
from streamdiff.video.picture import Fit

POLL_S = 0.5
"""How soon it makes sense to look again."""
RETRY_S = 2
MP4 = "video/mp4"
DEFAULT_SECONDS = 4.0
PICTURE = "input_reference"
REFERENCES = ("image_reference", "reference_url", "video_reference")
UNUSED = ("user", "metadata")
"""Fields that clients send and that change no video."""
_NAMED = re.compile(r"video_([a-z0-9]{1,32})_")
"""An id of a server with a name."""

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

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, json_schema_extra=_as_clients_write
    )

    prompt: Prompt | None = None
    """what to show; needed, unless `prompt_embeds` come instead"""
    model: str | None = Field(None, max_length=200, description="the one that /v1/models lists")
    seconds: (
        Annotated[float, Field(gt=0, le=86_400)] | Annotated[str, Field(pattern=r"^[0-9]{1,5}(\.[0-9]{1,3})?$")] | None
    ) = Field(None, description=f"length, default {DEFAULT_SECONDS:g}")
    size: Size | None = None
    """WIDTHxHEIGHT; an engine has one"""
    width: _Side | None = None
    height: _Side | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    """default, or -1: any; the answer has it"""
    fps: Fps | None = None
    """default: the model's own"""
    num_frames: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """length in frames"""
    num_inference_steps: Steps | None = None
    input_reference: Annotated[str, Field(max_length=bodies.MAX_JSON_BYTES)] | None = None
    """a picture that it begins with: a file of a form, or base64; JPEG, PNG, WebP or AVIF, no address"""
    fit: Fit | None = None
    """how a picture of other proportions is fitted; default cover"""
    strength: Strength | None = Field(
        None, description=f"noise mixed into `video_latents`, which are a file of a form; default {DEFAULT_STRENGTH}"
    )
    guidance_scale: Annotated[float, Field(ge=1, le=1)] | None = None
    """1: no guidance, as models here take none"""
    guidance_scale_2: Annotated[float, Field(ge=1, le=1)] | None = None
    """the same"""
    output_format: Literal["auto", "mp4"] | None = None
    response_format: Literal["video_bytes"] | None = None
    """of /v1/videos/generations"""
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    """videos: one for a request"""
    user: Any = None
    """has no effect"""
    metadata: Any = None
    """has no effect"""


class VideoError(Answer):
    """Why a video could not be made."""

    code: str
    message: str


class Video(Answer):
    """A video that is asked for, made, or kept."""

    id: str
    object: Literal["video"] = "video"
    model: str
    prompt: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    """per cent of the frames that are encoded"""
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None
    """when it and its file are forgotten"""
    seconds: str
    size: str
    fps: float
    num_frames: int
    num_inference_steps: int
    seed: int
    inference_time_s: float | None
    """seconds from its beginning to its last frame"""
    peak_memory_mb: float | None
    """MiB that the engine took meanwhile, at most: of the first rank's GPU, or without one in all"""
    error: VideoError | None
    remixed_from_video_id: None = None


class GeneratedVideo(Answer):
    """A video, in the answer to its request."""

    video_id: str
    video_bytes: str
    """an mp4 file, as base64"""


class VideoList(Answer):
    """Videos, in the order asked for."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool
    server: str | None
    """the one whose videos these are (serve.name); others have their own"""


class DeletedVideo(Answer):
    """A video that is no more."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class ModelEntry(Answer):
    """The model that is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["streamdiff"] = "streamdiff"


class ModelList(Answer):
    """All models of this server: one."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


# ---- what is asked for --------------------------------------------------------------------------------------------


def _fault(name: str, why: str, code: str = "invalid") -> Problem:
    return Problem(400, why, code=code, field=name[:40])


async def read_new_video(request: Request, ready: Ready) -> tuple[NewVideo, bytes | str | None, bodies.Files]:
    """The body of a request, JSON or a form, the picture in it, a file's bytes or base64, and files of features.

    Raises:
        Problem: 400 naming the field, 413, 415; 422 for features that the model does not take.
    """
    takes = {PICTURE: 0, **bodies.feature_files(ready)}
    given, sent = await bodies.read_fields(request, 400, takes, ready, required=True, forms=(FORM, URLENCODED))
    files = sent or {}
    if not isinstance(given, dict):
        raise Problem(400, "The body is JSON, but no object: give fields, such as `prompt`.", code="bad_json")
    fields = _flat(given if sent is None else _nested(given))
    wanted = _validated(fields, embeds="prompt_embeds" in files)
    picture = files.pop(PICTURE, None)
    if picture is not None and wanted.input_reference is not None:
        raise _fault(PICTURE, f"`{PICTURE}` stands in the form and in `extra_body`; one would be ignored.")
    if picture is None and wanted.input_reference is None and wanted.fit is not None:
        raise _fault("fit", f"`fit` says how `{PICTURE}` is fitted; give both.")
    return wanted, wanted.input_reference if picture is None else picture, files


def _nested(form: Mapping[str, str]) -> dict[str, Any]:
    """A form's texts, with objects where their names say so."""
    fields: dict[str, Any] = {}
    for name, value in form.items():
        found = _NESTED.fullmatch(name)
        if found is None:
            fields[name] = value
        elif isinstance(inner := fields.setdefault(found[1], {}), dict):
            inner[found[2]] = value
        else:
            why = f"`{found[1]}` is given twice, as `{found[1]}` and as `{name[:40]}`; give it once."
            raise _fault(found[1], why)
    return fields


def _from_text(name: str, given: Any, why: str) -> Any:
    """A field that is an object, or one as JSON. Raises Problem 400, which says `why`, for a text that is no JSON."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise _fault(name, why) from error


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with those of `extra_body` among them. Mutates: fields.

    Raises:
        Problem: 400 for an `extra_body` that is no object, or that says again what a field says.
    """
    extra = _from_text("extra_body", fields.pop("extra_body", None), "`extra_body` is not JSON.")
    if extra is None:
        return fields
    if not isinstance(extra, dict):
        raise _fault("extra_body", "`extra_body` is no object: give fields in it.")
    if twice := sorted(extra.keys() & fields.keys()):
        raise _fault(twice[0], f"`{twice[0][:40]}` stands in the body and in `extra_body`; one would be ignored.")
    return fields | extra


def _validated(given: Mapping[str, Any], *, embeds: bool) -> NewVideo:
    """The fields that are not empty; of a request with `embeds`, which stand for the prompt, without one. Raises
    Problem 400."""
    fields = {name: value for name, value in given.items() if value is not None and value != ""}
    for name in fields:
        if name in REFERENCES:
            why = f"`{name}` cannot be used: a video begins with a picture, `{PICTURE}`, or none."
            raise _fault(name, why, "unsupported")
    if PICTURE in fields:
        fields[PICTURE] = _reference(fields[PICTURE])
    if not embeds and "prompt" not in fields:
        raise _fault("prompt", "`prompt` is missing.")
    for name, value in fields.items():
        if isinstance(value, bool) and name in NewVideo.model_fields and name not in UNUSED:  # not 1 or 0
            raise _fault(name, f"`{name}` is {json.dumps(value)}; it must be a number or a text.")
    return read(NewVideo, fields, status=400, unknown="unsupported")


def _reference(given: Any) -> Any:
    """What `input_reference` is as base64, given as that or as an object, also one as JSON."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        why = f'`{PICTURE}` is no JSON; give base64, or {{"image_url": "data:..."}}.'
        given = _from_text(PICTURE, given, why)
    if not isinstance(given, dict):
        return given
    said = {name: value for name, value in given.items() if value is not None and value != ""}
    if said.keys() != {"image_url"} or not isinstance(said["image_url"], str):
        names = ", ".join(sorted(said))[:80] or "nothing"
        why = f"`{PICTURE}` has {names}; as an object it has `image_url` alone, a data: URL of base64."
        raise _fault(PICTURE, why, "unsupported")
    return said["image_url"]


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
    if wanted.size is not None and not is_size_of(wanted.size, ready):
        raise _fault("size", f"`size` is {wanted.size!r}; this engine makes {size}.")
    for name, value, own in (("width", wanted.width, ready.width), ("height", wanted.height, ready.height)):
        if value is not None and value != own:
            raise _fault(name, f"`{name}` is {value}; this engine makes {size}.")
    steps = ready.steps if wanted.num_inference_steps is None else wanted.num_inference_steps
    if wanted.num_inference_steps is not None and (why := steps_refusal(steps, ready)):
        raise _fault("num_inference_steps", why.replace("`steps`", "`num_inference_steps`"))
    fps = ready.native_fps if wanted.fps is None else wanted.fps
    frames = _frames(wanted, fps)
    if frames > (most := round(limit_s * ready.native_fps)):
        name = "seconds" if wanted.num_frames is None else "num_frames"
        raise _fault(name, f"That is {frames:,} frames; this server makes {most:,} at most.")
    seed = secrets.randbelow(MAX_SEED + 1) if wanted.seed is None or wanted.seed < 0 else wanted.seed
    return VideoRequest(ready.model, wanted.prompt or "", seed, steps, frames, fps, ready.width, ready.height)


def idempotency(key: str, caller: str, wanted: NewVideo, files: Mapping[str, bytes]) -> tuple[str, str]:
    """What a store knows a request with an `Idempotency-Key` by, and the rest of it: digests of the key of this caller,
    and of its fields and files."""
    # A form says 4 as text, and has the picture as a file.
    same = wanted if wanted.seconds is None else wanted.model_copy(update={"seconds": float(wanted.seconds)})
    fields = same.model_dump_json(exclude_defaults=True, exclude={PICTURE, *UNUSED}).encode()
    named = [part for name in sorted(files) for part in (name.encode(), files[name])]
    return _digest(caller.encode(), key.encode()), _digest(fields, *named)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _frames(wanted: NewVideo, fps: float) -> int:
    seconds = None if wanted.seconds is None else float(wanted.seconds)
    if seconds is not None and seconds <= 0:
        raise _fault("seconds", "`seconds` is 0; it must be above 0.")
    if wanted.num_frames is None:
        return max(1, round((DEFAULT_SECONDS if seconds is None else seconds) * fps))
    if seconds is not None and abs(wanted.num_frames - seconds * fps) >= max(1.0, fps):
        raise _fault(
            "seconds",
            f"`seconds` is {seconds:g}, but {wanted.num_frames} frames at {fps:g} per second are "
            f"{wanted.num_frames / fps:g} s; leave one of them out.",
        )
    return wanted.num_frames


_AS_STORED = ("id", "model", "prompt", "status", "fps", "seed", "peak_memory_mb")
"""Fields of a `Job` that a `Video` has under the same name."""


def video_of(job: Job, progress: int) -> Video:
    """A job as the API shows it."""
    times_s = (job.started_s, job.ended_s, job.expires_s)
    started, ended, expires = (None if time_s is None else int(time_s) for time_s in times_s)
    return Video(
        **{name: getattr(job, name) for name in _AS_STORED},
        progress=progress,
        created_at=int(job.created_s),
        started_at=started,
        completed_at=ended,
        expires_at=expires,
        seconds=f"{job.frames / job.fps:g}",
        size=f"{job.width}x{job.height}",
        num_frames=job.frames,
        num_inference_steps=job.steps,
        inference_time_s=job.inference_s,
        error=VideoError(code="failed", message=job.error) if job.status == "failed" else None,
    )


# ---- routes -------------------------------------------------------------------------------------------------------

_CONTENT = (
    answer("The video; Range is heeded", MP4, BINARY)
    | answer("A part of it", MP4, BINARY, 206)
    | answer("No such part of it", "text/plain", status=416)
)
_FIELDS = NewVideo.model_json_schema()
_NEW_VIDEO = json_or_form(_FIELDS, FEATURES)
_NEW_VIDEO["content"][JSON] = {"schema": _FIELDS | {"required": ["prompt"]}}
router = APIRouter(prefix="/v1", tags=["videos"], responses=problems(401, 403, 404))


def _runner(state: AppState) -> JobRunner:
    """Raises Problem 404 where the server makes no videos."""
    if state.jobs is None:
        raise Problem(404, "This server makes no videos: start it with --jobs-dir FOLDER.", code="jobs_off")
    return state.jobs


def _visible_jobs(request: Request, state: State) -> JobRunner:
    state.require_for_jobs(request, Role.VIEWER)
    return _runner(state)


def _changeable_jobs(request: Request, state: State) -> JobRunner:
    state.require_for_jobs(request, Role.CONTROLLER)
    state.limit(request)
    return _runner(state)


Visible = Annotated[JobRunner, Depends(_visible_jobs)]
"""The jobs, for a request that may look at them."""
Changeable = Annotated[JobRunner, Depends(_changeable_jobs)]
"""The jobs, for a request that may ask for videos and delete them."""


_Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=255, pattern="^[ -~]*$", description="of a retry the same"
    ),
]


def _unknown(id: str) -> Problem:
    return Problem(404, f"There is no video {id[:64]!r}: deleted, expired, or never asked for.", code="unknown")


async def _visible_job(jobs: Visible, id: str) -> Job:
    if (job := await jobs.get(id)) is None:
        raise _unknown(id)
    return job


Found = Annotated[Job, Depends(_visible_job)]
"""The job that the path names, for a request that may look at it."""


@router.post("/videos", summary="Have a video made", **operation("steer", 409, 507, body=_NEW_VIDEO))
async def create_video(request: Request, state: State, jobs: Changeable, key: _Key = None) -> Video:
    job = await _submitted(request, state, jobs, key)
    return video_of(job, jobs.progress(job))


async def _submitted(request: Request, state: AppState, jobs: JobRunner, key: str | None) -> Job:
    """The job that a request asks for. Raises Problem."""
    ready = state.manager.ready
    wanted, image, files = await read_new_video(request, ready)
    state.manager.words.check(wanted.prompt or "", "prompt")
    made = resolve(wanted, ready, runner.LONGEST_JOB_S, state.config.model.name)
    picture = await bodies.given_picture(image, ready, wanted.fit, status=400, field="input_reference")
    prompt = wanted.prompt is not None
    features = await bodies.given_features(files, wanted.strength, ready, prompt=prompt, image=picture is not None)
    given = files if picture is None else files | {store.PICTURE: picture.tobytes()}
    known_by = None if key is None else idempotency(key, state.caller(request), wanted, given)
    return await jobs.submit(replace(made, strength=features.strength), address_of(request), given, known_by)


async def _made(request: Request, state: State, jobs: Changeable, key: _Key = None) -> Job:
    """The job that a request asks for, when it has ended. One that nobody waits for any more is forgotten, unless it
    has a key to ask for it again."""
    job: Job | None = await _submitted(request, state, jobs, key)
    while job is not None and job.status in ("queued", "in_progress"):
        await asyncio.sleep(POLL_S)
        if key is None and await request.is_disconnected():
            await jobs.delete(job.id)
        job = await jobs.get(job.id)
    if job is None:
        raise Problem(409, "The video was deleted before it was made.", code="deleted")
    return job


Made = Annotated[Job, Depends(_made)]
"""The job that a request asks for, when it has ended."""
_WAITED = operation("steer", 409, 422, 507, body=_NEW_VIDEO, answers=answer("The video", MP4, BINARY))


@router.post("/videos/sync", summary="Have a video made, and wait for it", response_class=FileResponse, **_WAITED)
async def make_video(jobs: Changeable, job: Made) -> Response:
    return await video_content(jobs, job)


@router.post(
    "/videos/generations", summary="The same, as TensorRT-LLM answers it",
    **operation("steer", 409, 422, 507, body=_NEW_VIDEO),
)  # fmt: skip
async def generate_video(jobs: Changeable, job: Made) -> GeneratedVideo:
    file = await video_content(jobs, job)
    data = await asyncio.to_thread(Path(file.path).read_bytes)
    return GeneratedVideo(video_id=job.id, video_bytes=base64.b64encode(data).decode())


@router.get("/videos", summary="Videos asked for, and kept", **operation("watch", 400))
async def list_videos(
    state: State,
    jobs: Visible,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> VideoList:
    name = state.config.serve.name
    found = await jobs.page(after=after, limit=limit + 1, order=order)
    if found is None:
        raise _unknown_start(after or "", name)
    data = [video_of(job, jobs.progress(job)) for job in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    more = len(found) > limit
    return VideoList(data=data, first_id=first, last_id=last, has_more=more, server=name)


def _unknown_start(after: str, name: str | None) -> Problem:
    """What is wrong with `after`, on the server `name`."""
    why, code = f"`after` is {after[:64]!r}, which is no video here.", "invalid"
    other = _NAMED.match(after)
    if other is not None and other[1] != name:
        here = "one without a name" if name is None else repr(name)
        code = "other_server"
        why += f" It is of the server {other[1]!r}; a list has the videos of one server, here of {here}."
    return Problem(400, why, code=code, field="after")


@router.get("/videos/{id}", summary="How far one is", **operation("watch"))
async def show_video(response: Response, jobs: Visible, job: Found) -> Video:
    response.headers["openai-poll-after-ms"] = str(round(POLL_S * 1000))
    return video_of(job, jobs.progress(job))


@router.get(
    "/videos/{id}/content", summary="The video itself", response_class=FileResponse,
    **operation("watch", 400, 422, answers=_CONTENT),
)  # fmt: skip
async def video_content(jobs: Visible, job: Found, variant: Literal["video"] = "video") -> FileResponse:
    if job.status == "failed":
        raise Problem(422, f"The video could not be made: {job.error}.", code="failed")
    if job.status != "completed":
        why = f"The video is {job.status.replace('_', ' ')} ({jobs.progress(job)} %)."
        raise Problem(404, why, {"Retry-After": str(RETRY_S)}, code=job.status)
    if (found := await jobs.video(job)) is None:
        raise Problem(404, "The video's file is gone from the server's disk.", code="gone")
    return FileResponse(found, media_type=MP4, filename=found.name)


@router.delete("/videos/{id}", summary="Forget one; if it is being made, that ends", **operation("steer", 507))
async def delete_video(jobs: Changeable, id: str) -> DeletedVideo:
    if not await jobs.delete(id):
        raise _unknown(id)
    return DeletedVideo(id=id)


@router.get("/models", summary="The model that is loaded", **operation("watch"))
async def list_models(request: Request, state: State) -> ModelList:
    state.require_for_jobs(request, Role.VIEWER)
    return ModelList(data=[ModelEntry(id=state.manager.ready.model, created=state.started_s)])


@router.get("/models/{id:path}", summary="The same, by its name", **operation("watch"))
async def show_model(request: Request, state: State, id: str) -> ModelEntry:
    state.require_for_jobs(request, Role.VIEWER)
    check_model(id, state.manager.ready, state.config.model.name)
    return ModelEntry(id=id, created=state.started_s)
