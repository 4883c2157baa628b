"""`/v1/videos` and `/v1/models`: videos as jobs, in the words that clients of OpenAI's video API speak."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse

from streamdiff.engine.features import NAMES
from streamdiff.server.app_state import AppState
from streamdiff.server.auth import Role
from streamdiff.server.jobs.job import Job
from streamdiff.server.jobs.runner import JobRunner
from streamdiff.server.jobs.store import KeyReused
from streamdiff.server.load import Unavailable
from streamdiff.server.peers import address_of, share_of
from streamdiff.server.problem import Problem, openai_problem_responses
from streamdiff.server.routes import video_schemas as schemas
from streamdiff.server.routes.dependencies import BINARY, JSON, State, answer, needs
from streamdiff.server.routes.forms import FEATURE_FILES, FORM, given_features, given_picture
from streamdiff.server.routes.video_schemas import Video, video_of

POLL_S = 0.5
"""How soon it makes sense to look again."""
RETRY_S = 2
MP4 = "video/mp4"

_NAMED = re.compile(r"video_([a-z0-9]{1,32})_")
"""An id of a server with a name."""
_PROBLEMS = openai_problem_responses(
    s401="This takes a token, as API key",
    s403="The token is good for watching only, or the page is of another origin",
    s404="No such video, or this server makes none (serve.jobs_dir)",
)
_NO_ROOM = "The server's disk takes nothing; Retry-After: when to ask again"
_NOT_CREATED = openai_problem_responses(
    s400="A field is wrong, or would be ignored; `param` names it",
    s404="No such model, or this server makes no videos (serve.jobs_dir)",
    s409="Another request had this `Idempotency-Key`",
    s413="The body is too large",
    s415="The body is neither JSON nor a form",
    s422="`prompt_embeds`, `image_latents` or `video_latents` are not such as the model takes; `param` names them",
    s429="The queue or the disk is full, or too many requests; Retry-After: when to go on",
    s507=_NO_ROOM,
)
_BAD_QUERY = openai_problem_responses(s400="A query parameter is wrong; `param` names it")
_CONTENT = (
    answer("The video; Range is heeded", MP4, BINARY)
    | answer("A part of it", MP4, BINARY, 206)
    | answer("No such part of it", "text/plain", status=416)
    | openai_problem_responses(
        s400="Another `variant` than `video`",
        s404="No such video, or it is being made: then Retry-After says when to ask again",
        s422="It could not be made",
    )
)
_FIELDS = schemas.NewVideo.model_json_schema()
_NEW_VIDEO = {
    JSON: {"schema": _FIELDS | {"required": ["prompt"]}},
    FORM: {"schema": _FIELDS | {"properties": _FIELDS["properties"] | FEATURE_FILES}},
}
router = APIRouter(prefix="/v1", tags=["videos"], responses=_PROBLEMS)


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


def _unknown(id: str) -> Problem:
    return Problem(404, f"There is no video {id[:64]!r}: deleted, expired, or never asked for.", code="unknown")


def _unavailable(error: Unavailable) -> Problem:
    status = 507 if error.code == "storage" else 429
    return Problem(status, str(error), {"Retry-After": str(error.retry_after_s)}, code=error.code)


async def _visible_job(jobs: Visible, id: str) -> Job:
    if (job := await jobs.get(id)) is None:
        raise _unknown(id)
    return job


Found = Annotated[Job, Depends(_visible_job)]
"""The job that the path names, for a request that may look at it."""


@router.post(
    "/videos", summary="Have a video made", responses=_NOT_CREATED,
    **needs("steer", requestBody={"required": True, "content": _NEW_VIDEO}),
)  # fmt: skip
async def create_video(request: Request, state: State, jobs: Changeable) -> Video:
    serve, ready = state.config.serve, state.manager.ready
    wanted, image, files = await schemas.read_new_video(request, ready)
    made = schemas.resolve(wanted, ready, serve.jobs_seconds, state.config.model.name)
    picture = await given_picture(image, ready, wanted.fit, status=400, field="input_reference")
    prompt, share = wanted.prompt is not None, share_of(serve.jobs_queue, serve.address_share)
    given = await given_features(files, wanted.strength, ready, prompt=prompt, image=picture is not None)
    sent = [None if picture is None else picture.tobytes(), *(files.get(name) for name in NAMES)]
    key = schemas.idempotency(request, state.caller(request), wanted, *sent)
    try:
        job = await jobs.submit(made, address_of(request), share, picture, given, key)
    except KeyReused as error:
        raise Problem(409, str(error), code="idempotency_key", field="Idempotency-Key") from error
    except Unavailable as error:
        raise _unavailable(error) from error
    return video_of(job, jobs.progress(job))


@router.get("/videos", summary="Videos asked for, and kept", responses=_BAD_QUERY, **needs("watch"))
async def list_videos(
    state: State,
    jobs: Visible,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> schemas.VideoList:
    name = state.config.serve.name
    found = await jobs.page(after=after, limit=limit + 1, order=order)
    if found is None:
        raise _unknown_start(after or "", name)
    data = [video_of(job, jobs.progress(job)) for job in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    more = len(found) > limit
    return schemas.VideoList(data=data, first_id=first, last_id=last, has_more=more, server=name)


def _unknown_start(after: str, name: str | None) -> Problem:
    """What is wrong with `after`, on the server `name`."""
    why, code = f"`after` is {after[:64]!r}, which is no video here.", "invalid"
    other = _NAMED.match(after)
    if other is not None and other[1] != name:
        here = "one without a name" if name is None else repr(name)
        code = "other_server"
        why += f" It is of the server {other[1]!r}; a list has the videos of one server, here of {here}."
    return Problem(400, why, code=code, field="after")


@router.get("/videos/{id}", summary="How far one is", **needs("watch"))
async def show_video(response: Response, jobs: Visible, job: Found) -> Video:
    response.headers["openai-poll-after-ms"] = str(round(POLL_S * 1000))
    return video_of(job, jobs.progress(job))


@router.get(
    "/videos/{id}/content", summary="The video itself", response_class=FileResponse, responses=_CONTENT,
    **needs("watch"),
)  # fmt: skip
async def video_content(jobs: Visible, job: Found, variant: str = "video") -> Response:
    if variant != "video":
        why = f"`variant` is {variant[:40]!r}; there is `video` only."
        raise Problem(400, why, code="invalid", field="variant")
    if job.status == "failed":
        raise Problem(422, f"The video could not be made: {job.error}.", code="failed")
    if job.status != "completed":
        why = f"The video is {job.status.replace('_', ' ')} ({jobs.progress(job)} %)."
        raise Problem(404, why, {"Retry-After": str(RETRY_S)}, code=job.status)
    if (found := await jobs.video(job)) is None:
        raise Problem(404, "The video's file is gone from the server's disk.", code="gone")
    path, status = found
    return FileResponse(path, media_type=MP4, filename=path.name, stat_result=status)


@router.delete(
    "/videos/{id}", summary="Forget one; if it is being made, that ends",
    responses=openai_problem_responses(s429="Too many requests", s507=_NO_ROOM), **needs("steer"),
)  # fmt: skip
async def delete_video(jobs: Changeable, id: str) -> schemas.DeletedVideo:
    try:
        if not await jobs.delete(id):
            raise _unknown(id)
    except Unavailable as error:
        raise _unavailable(error) from error
    return schemas.DeletedVideo(id=id)


@router.get("/models", summary="The model that is loaded", **needs("watch"))
async def list_models(request: Request, state: State) -> schemas.ModelList:
    state.require_for_jobs(request, Role.VIEWER)
    return schemas.ModelList(data=[schemas.ServedModel(id=state.manager.ready.model, created=state.started_s)])


@router.get("/models/{id:path}", summary="The same, by its name", **needs("watch"))
async def show_model(request: Request, state: State, id: str) -> schemas.ServedModel:
    state.require_for_jobs(request, Role.VIEWER)
    schemas.check_model(id, state.manager.ready, state.config.model.name)
    return schemas.ServedModel(id=id, created=state.started_s)
