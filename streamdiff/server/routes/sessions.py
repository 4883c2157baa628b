"""`/api/sessions`: open, list, show, change, pause, reset and end sessions, save them as files, and
send them on to allowed targets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.change_log import parse_log
from streamdiff.engine.features import NOTHING, Features
from streamdiff.engine.messages import GetLog, Pictures, Save, SetTimeline
from streamdiff.engine.timeline import MAX_CHANGES, TimedChange, parse_timeline, placed, timeline_schema
from streamdiff.engine.validation import digest_of
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.server.app_state import AppState, count_refusals, state_of, watcher_of
from streamdiff.server.auth import Role
from streamdiff.server.media.clip import KEPT_S, write_clip
from streamdiff.server.outputs.output import OutputStatus
from streamdiff.server.problem import Problem, Unavailable, refused_as
from streamdiff.server.routes import bodies, dependencies, schemas
from streamdiff.server.routes.bodies import FORM, JSON, SNAPSHOT
from streamdiff.server.routes.control import carry_out, status_of
from streamdiff.server.routes.dependencies import Controlled, State, Steered, Watched, answer, operation, problems
from streamdiff.server.routes.schemas import Receipts, SessionInfo
from streamdiff.server.sessions import control as messages
from streamdiff.server.sessions.control import LARGEST_SNAPSHOT_BYTES, MAX_BODY_BYTES, ControlMessage, StreamEnded
from streamdiff.server.sessions.keeper import record_of, spec_of
from streamdiff.server.sessions.live_session import LiveSession, StreamSpec
from streamdiff.snapshot_header import check_signature, read_saved_session, signed

logger = logging.getLogger(__name__)

OCTETS, JSON_LINES = "application/octet-stream", "application/jsonl"
SAVE_TIMEOUT_S = 60.0
SEND_LIMIT_S = 10.0
"""A download that reads nothing for so many seconds is aborted, as others wait for its slot."""
_PIECE = 1 << 18
_LATER: dependencies.Responses = {
    202: {
        "description": "The engine has it and carries it out later (receipt `asked`). GET shows what holds by then",
        "model": Receipts,
    }
}
_OF_READY = (
    *("chunk_frames", "native_fps", "text_shape", "chunk_shape", "first_chunks"), *("begins_with_picture", "controls"),
)  # fmt: skip
"""Fields of `Ready` that the capacity has under the same name."""
_SENT = "a file"
"""Stands for a picture that came as a file of a form, which is never text."""
WithImageT = TypeVar("WithImageT", schemas.NewSession, schemas.SessionChange)


_SNAPSHOT = "a file of GET /api/sessions/{id}/snapshot, to go on from; without seed, kv_context, image"
_PICTURE = "the picture itself"
LOG = "log"
_LOG = "a file of GET /api/sessions/{id}/log, to play again, and on from there; without prompt, seed, steps, kv_context"

_NEW = dependencies.json_or_form(
    schemas.NewSession.model_json_schema(),
    {"image": _PICTURE, SNAPSHOT: _SNAPSHOT, LOG: _LOG} | dependencies.FEATURES,
    required=False,
)
_CHANGE = dependencies.json_or_form(schemas.SessionChange.model_json_schema(), {"image": _PICTURE})
_CLIPS = {"h264": ("mp4", "video/mp4"), "vp8": ("webm", "video/webm")}
_VIDEO = answer(
    "An mp4 file of H.264, or a WebM file of VP8, which begins at a key frame before", "video/mp4", dependencies.BINARY
)
_FILE = answer("A safetensors file; Content-Length: its size", OCTETS, dependencies.BINARY)
router = APIRouter(prefix="/api/sessions", tags=["sessions"], responses=problems(401, 403, 404, 410, 422, 429))


@router.get("", summary="All that the caller may watch", **operation("watch"))
async def list_sessions(request: Request, state: State) -> schemas.SessionList:
    state.require(request, Role.VIEWER)
    sessions = [_info_of(request, session) for session in state.watchable(request)]
    return schemas.SessionList(server=state.config.serve.name, sessions=sessions, capacity=_capacity(state))


@router.post("", status_code=201, summary="Open a session", **operation("steer", 503, body=_NEW))
async def open_session(request: Request, response: Response, state: State) -> schemas.OpenedSession:
    with count_refusals(state.metrics.refused):
        if state.visits(request) and bodies.media_type(request) == FORM:
            raise Problem(415, "Files take the control token; a visitor's session is opened by JSON.")
        async with _place_for_upload(request, state):
            return await _open(request, response, state)


async def _opened(
    request: Request, response: Response, state: AppState, spec: StreamSpec, snapshot: bytes | None = None, **more: Any
) -> schemas.OpenedSession:
    """Open a session as `Manager.open` does; the answer. Raises Problem. Mutates: response."""
    with refused_as("refused"):
        session = await state.manager.open(spec, snapshot, **more)
    assert session.tokens is not None
    tokens = {"view_token": session.tokens.view, "control_token": session.tokens.control}
    response.headers["Location"] = f"/api/sessions/{session.id}"
    return schemas.OpenedSession.model_validate(_info_of(request, session).model_dump() | tokens)


async def _open(request: Request, response: Response, state: AppState) -> schemas.OpenedSession:
    """Open the session that a request asks for; the answer. Raises Problem. Mutates: response."""
    ready = state.manager.ready
    files = {"image": 0, LOG: 0, SNAPSHOT: LARGEST_SNAPSHOT_BYTES, **bodies.feature_files(ready)}
    wanted, picture, sent = await _read(request, schemas.NewSession, state, files)
    schemas.check_new(wanted, ready)
    prompt = wanted.prompt is not None
    given = await bodies.given_features(sent, wanted.strength, ready, prompt=prompt, image=picture is not None)
    spec = _spec(wanted, picture, state.config, given)
    if (snapshot := sent.get(SNAPSHOT)) is not None:
        spec = await asyncio.to_thread(_spec_of_saved, snapshot, wanted, given, state)
    state.manager.words.check(spec.prompt, "prompt")
    more: dict[str, Any] = {}
    if (log := sent.get(LOG)) is not None and snapshot is None:
        spec, more = await asyncio.to_thread(_log_to_play, log, wanted, spec, state)
    return await _opened(request, response, state, spec, snapshot, **more)


@router.get("/{session}", summary="One session", **operation("watch"))
async def show_session(request: Request, live: Watched) -> SessionInfo:
    return _info_of(request, live)


@router.patch(
    "/{session}", summary="Change it while it plays",
    **operation("steer", 409, 503, 504, body=_CHANGE, answers=_LATER),
)  # fmt: skip
async def change_session(request: Request, response: Response, state: State, live: Steered) -> Receipts:
    change, picture, _ = await _read(request, schemas.SessionChange, state, {"image": 0})
    messages = schemas.messages_of(change, state.manager.ready, picture)
    return await _carry_out_all(request, live, messages, response)


@router.delete("/{session}", summary="End it", **operation("steer"))
async def end_session(request: Request, state: State, session: str) -> schemas.EndedSession:
    state.limit(request)
    if state.manager.end_reason(session) is None:
        state.require(request, Role.CONTROLLER, state.session(request))
        await state.manager.end(session, "deleted")
    return schemas.EndedSession(id=session, ended=state.manager.end_reason(session) or "deleted")


@router.delete("/{session}/input", status_code=204, summary="End its video input", **operation("steer"))
async def end_input(request: Request, live: Steered) -> None:
    live.wheel.check_holder(watcher_of(request, live))
    if live.input is None:
        raise Problem(404, "No video feeds the session.", code="no_input")
    await live.input.end("delete")


@router.post("/{session}/pause", summary="Hold it", **operation("steer", 503, 504, answers=_LATER))
async def pause_session(request: Request, response: Response, live: Steered) -> Receipts:
    return await _carry_out_all(request, live, [messages.HoldMessage(type="pause")], response)


@router.post("/{session}/resume", summary="Let it go on", **operation("steer", 503, 504, answers=_LATER))
async def resume_session(request: Request, response: Response, live: Steered) -> Receipts:
    return await _carry_out_all(request, live, [messages.HoldMessage(type="resume")], response)


@router.post("/{session}/reset", summary="Restart the stream", **operation("steer", 503, 504, answers=_LATER))
async def reset_session(request: Request, response: Response, live: Steered) -> Receipts:
    return await _carry_out_all(request, live, [messages.ResetMessage(type="reset")], response)


_AT_CHUNK = dependencies.body_of(JSON, schemas.ChunkOfStream.model_json_schema())


async def _chunk(request: Request) -> int:
    return schemas.read(schemas.ChunkOfStream, await bodies.read_json(request, MAX_BODY_BYTES)).chunk


@router.post(
    "/{session}/rewind", summary="Go back to an earlier chunk, and on from there",
    **operation("steer", 409, 503, 504, body=_AT_CHUNK, answers=_LATER),
)  # fmt: skip
async def rewind_session(request: Request, response: Response, live: Steered) -> Receipts:
    message = messages.RewindMessage(type="rewind", chunk=await _chunk(request))
    return await _carry_out_all(request, live, [message], response)


@router.post(
    "/{session}/branch", status_code=201, summary="Open a session that goes on from an earlier chunk of this one",
    **operation("steer", 409, 503, body=_AT_CHUNK),
)  # fmt: skip
async def branch_session(request: Request, response: Response, state: State, live: Steered) -> schemas.OpenedSession:
    with count_refusals(state.metrics.refused):
        state.visits(request, live)
        live.wheel.check_holder(watcher_of(request, live))
        spec, chunk = spec_of(record_of(live), state.manager.ready), await _chunk(request)
        return await _opened(request, response, state, spec, source=live.id, chunk=chunk)


def _spec(
    wanted: schemas.NewSession, picture: Pictures | None, defaults: Config, given: Features = NOTHING
) -> StreamSpec:
    default = "" if given.prompt_embeds is not None else defaults.session.prompt
    return StreamSpec(
        prompt=default if wanted.prompt is None else wanted.prompt,
        seed=wanted.seed,
        fps=defaults.playback.fps if wanted.fps is None else wanted.fps,
        steps=wanted.steps,
        kv_context=wanted.kv_context,
        image=picture,
        features=given,
        adaptive=defaults.serve.adaptive if wanted.adaptive is None else wanted.adaptive,
    )


def _spec_of_saved(snapshot: bytes, wanted: schemas.NewSession, given: Features, state: AppState) -> StreamSpec:
    """A session that continues from a file, with what it is to have instead. Reads all of the file: on a thread.

    Raises:
        Problem: 413; 422 for what is no snapshot, or not signed with this server's key where it has to be, or a field
            that such a session cannot have.
    """
    serve = state.config.serve
    if len(snapshot) > LARGEST_SNAPSHOT_BYTES:
        why = f"`snapshot` is larger than {LARGEST_SNAPSHOT_BYTES >> 20} MiB, an eighth of this server's memory."
        raise Problem(413, why, code="too_large", field=SNAPSHOT)
    _refuse_given(wanted, ("seed", "kv_context", "image"), given)
    try:
        saved = read_saved_session(snapshot)
        if not serve.trust_snapshots:
            check_signature(snapshot, state.snapshot_key)
    except ConfigError as error:
        raise Problem(422, f"`snapshot`: {error}", code=error.code or "refused", field=SNAPSHOT) from error
    return _spec(wanted, None, state.config).resumed(saved, wanted.prompt, wanted.steps)


def _refuse_given(wanted: schemas.NewSession, names: tuple[str, ...], given: Features) -> None:
    """Raises Problem for what a session has from a file that it is opened with."""
    fixed = [name for name in names if name in wanted.model_fields_set and getattr(wanted, name) is not None]
    if refused := [*fixed, *given.names]:
        why = f"`{refused[0]}`: the session has that of the snapshot or log that it goes on from; leave it out."
        raise Problem(422, why, code="invalid", field=refused[0])


def _log_to_play(
    data: bytes, wanted: schemas.NewSession, spec: StreamSpec, state: AppState
) -> tuple[StreamSpec, dict[str, Any]]:
    """A session that plays a log, and goes on: as `spec` with what the log began with, and more of `messages.Open`. Of
    steps it has the log's first, and then what the load decides. Reads all of the file: on a thread.

    Raises:
        Problem: 422 for what is no log, has too many changes or another picture, or a field that it has itself.
    """
    _refuse_given(wanted, ("prompt", "seed", "steps", "kv_context"), spec.features)
    try:
        log = parse_log(data, LOG)
    except ConfigError as error:
        raise Problem(422, str(error), code=error.code, field=LOG) from error
    header = log.header
    without = (replace(each, steps=None) for each in log.changes)
    changes = tuple(each for each in without if each != TimedChange(at=each.at))
    for wrong, why in (
        (len(changes) > MAX_CHANGES, f"it has {len(changes)} changes; a live session plays {MAX_CHANGES} at most"),
        (digest_of(spec.image) != header.image, "it began with another picture, or none; give what it had"),
    ):
        if wrong:
            raise Problem(422, f"`{LOG}`: {why}.", code="log", field=LOG)
    for prompt in (header.prompt, *(each.prompt or "" for each in changes)):
        state.manager.words.check(prompt, LOG)
    begins = replace(spec, prompt=header.prompt, seed=header.seed, steps=header.steps, kv_context=header.kv_context)
    return begins, {"changes": changes, "facts": header.model}


async def _read(
    request: Request, model: type[WithImageT], state: AppState, files: dict[str, int]
) -> tuple[WithImageT, Pictures | None, bodies.Files]:
    """The body, JSON or a form with these `files`, the picture in it, fitted to the engine's size, and other files."""
    given, sent = await bodies.read_fields(request, 422, files, state.manager.ready)
    others = sent or {}
    if (file := others.pop("image", None)) is not None:
        given["image"] = _SENT
    wanted = schemas.read(model, given, is_form=sent is not None)
    image = wanted.image if file is None else file
    picture = await bodies.given_picture(image, state.manager.ready, wanted.fit, status=422, field="image")
    return wanted, picture, others


def _info_of(request: Request, session: LiveSession) -> SessionInfo:
    """A session as the API shows it."""
    state, prefix = state_of(request), request.scope.get("root_path", "")
    now_s = clock.monotonic_s()
    session.lifetime.watch(session.watched, not session.idle, now_s)
    ends_s = session.lifetime.ends_s
    facts = session.state(may_control=False)  # without the engine's reason
    return SessionInfo(
        **{name: facts[name] for name in SessionInfo.model_fields if name in facts},
        id=session.id,
        watched=session.watched,
        age_s=round(now_s - session.lifetime.opened_s, 1),
        ends_in_s=None if ends_s is None else round(max(0.0, ends_s - now_s), 1),
        share=round(state.manager.load.share(session.fps, session.steps), 4),
        whep=f"{prefix}/whep/{session.id}",
        control=f"{prefix}/api/sessions/{session.id}/control",
        stats=session.stats(),
    )


def _capacity(state: AppState) -> schemas.CapacityInfo:
    manager, ready = state.manager, state.manager.ready
    return schemas.CapacityInfo(
        **{name: getattr(ready, name) for name in _OF_READY},
        sessions_fit=ready.max_sessions,
        sessions_away=ready.max_swapped_sessions,
        free_sessions=manager.load.free_sessions(),
        work_s=manager.load.work_s,
        share=round(sum(manager.load.shares()), 4),
        share_limit=manager.load.limit,
        occupancy=[round(share, 3) for share in manager.load.occupancy],
        places=manager.sessions_by_location(),
        size=f"{ready.width}x{ready.height}",
        steps=list(ready.steps_known),
        draining=manager.draining,
    )


async def _carry_out_all(
    request: Request, session: LiveSession, messages: list[ControlMessage], response: Response
) -> Receipts:
    """Carry out all, in order, or none where one would be refused; the response's status says whether some is still to
    come. Mutates: response."""
    for message in messages:
        session.wheel.check(message, watcher_of(request, session))
    session.check(messages)
    receipts = [await carry_out(session, message) for message in messages]
    if session.closed:
        raise StreamEnded(session.id)
    response.status_code = status_of(receipts)
    return Receipts(receipts=[receipt.message() for receipt in receipts], session=_info_of(request, session))


# ---- outputs ------------------------------------------------------------------------------------------------------


@router.get("/{session}/outputs", summary="Where it is sent", **operation("steer", 503))
async def list_outputs(state: State, live: Controlled) -> schemas.OutputList:
    return schemas.OutputList(outputs=state.outputs.of(live))


@router.post(
    "/{session}/outputs", status_code=201, summary="Record it, or send it on",
    **operation("steer", 503, body=dependencies.body_of(JSON, schemas.NewOutput.model_json_schema())),
)  # fmt: skip
async def add_output(request: Request, response: Response, state: State, live: Controlled) -> OutputStatus:
    wanted = schemas.read(schemas.NewOutput, await bodies.read_json(request, MAX_BODY_BYTES))
    with refused_as("refused"):
        made = await state.outputs.add(live, wanted.target)
    response.headers["Location"] = f"/api/sessions/{live.id}/outputs/{made.id}"
    return made


@router.delete("/{session}/outputs/{id}", status_code=204, summary="Send it there no more", **operation("steer", 503))
async def remove_output(state: State, live: Controlled, id: str) -> None:
    if not await state.outputs.remove(live, id):
        raise Problem(404, "There is no such output.", code="unknown")


# ---- snapshots ----------------------------------------------------------------------------------------------------


@router.get(
    "/{session}/snapshot", response_class=Response, summary="The session as one file",
    **operation("steer", 409, 503, 504, answers=_FILE),
)  # fmt: skip
async def save_session(state: State, live: Controlled) -> Response:
    async with _place(state.snapshots) as held:
        header, rest = signed(await _taken(state, live, Save(live.id), 409), state.snapshot_key)
        return _Download(f"{live.id}.safetensors", OCTETS, header, rest, held.pop_all())


# ---- logs and timelines -------------------------------------------------------------------------------------------


@router.get(
    "/{session}/log", response_class=Response, summary="What has steered it, to be played again",
    **operation("steer", 409, 503, 504, answers=answer("JSON lines, see docs/replay.md", JSON_LINES)),
)  # fmt: skip
async def get_log(state: State, live: Controlled) -> Response:
    async with _place(state.snapshots) as held:
        data = await _taken(state, live, GetLog(live.id), 409)
        return _Download(f"{live.id}.jsonl", JSON_LINES, b"", data, held.pop_all())


@router.post(
    "/{session}/timeline", summary="Let changes come by themselves",
    **operation("steer", 409, 503, 504, body=dependencies.body_of(JSON, timeline_schema())),
)  # fmt: skip
async def set_timeline(request: Request, state: State, live: Steered) -> schemas.TimelineInfo:
    """Replaces the one before; an empty list ends it. Chunks and seconds count from the next chunk that is begun, and
    from 0 after a reset."""
    live.wheel.check_holder(watcher_of(request, live))
    given = await bodies.read_json(request, MAX_BODY_BYTES)
    with refused_as("timeline"):
        changes = placed(parse_timeline(given), state.manager.ready.chunk_frames / live.fps)
    if (at := next((index for index, each in enumerate(changes) if each.steps is not None), None)) is not None:
        why = "A live session has its steps by its load: change them by PATCH, and leave `steps` out of the timeline."
        raise Problem(422, why, code="timeline", field=f"{at}.steps")
    for index, each in enumerate(changes):
        state.manager.words.check(each.prompt or "", f"{index}.prompt")
    accepted = await _taken(state, live, SetTimeline(live.id, changes), 422)
    live.show_timeline(changes, accepted.begin)
    return schemas.TimelineInfo(changes=len(changes))


# ---- clips --------------------------------------------------------------------------------------------------------


@router.get(
    "/{session}/clip", response_class=Response, summary="Its last seconds as a video",
    **operation("watch", 400, 409, 503, answers=_VIDEO),
)  # fmt: skip
async def clip(state: State, live: Watched, seconds: Annotated[float, Query(ge=1, le=KEPT_S)] = 10.0) -> Response:
    async with _place(state.clips) as held:
        if (last := live.playback.last(seconds)) is None:
            raise Problem(409, "Nothing was shown yet: a clip is what was sent to viewers.", code="not_watched")
        codec, frames = last
        video = await asyncio.to_thread(write_clip, codec, live.playback.format, frames, seconds)
        ending, media_type = _CLIPS[codec]
        return _Download(f"{live.id}.{ending}", media_type, b"", video, held.pop_all())


@contextlib.asynccontextmanager
async def _place_for_upload(request: Request, state: AppState) -> AsyncIterator[None]:
    """While the form of a request is read and used that may hold a snapshot, which lies in memory: as many at a time as
    are taken or sent. Raises Problem, 503, where there are more."""
    length = request.headers.get("content-length", "")
    small = length.isdigit() and int(length) <= bodies.MAX_FORM_BYTES
    async with contextlib.nullcontext() if small or bodies.media_type(request) != FORM else _place(state.snapshots):
        yield


@contextlib.asynccontextmanager
async def _place(places: asyncio.Semaphore) -> AsyncIterator[contextlib.AsyncExitStack]:
    """Context manager: one of the `places` for files that lie in memory, given back at the end, or by who takes it over
    with `pop_all`. Raises Problem, 503, where none is free."""
    if places.locked():
        raise Unavailable("busy", "Other files are being sent; ask again.", 1)
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(places)
        yield held


async def _taken(state: AppState, live: LiveSession, command: Save | GetLog | SetTimeline, refused: int) -> Any:
    """The engine's answer to a command. Raises Problem: `refused`, 410, 503, 504."""
    if not live.opened:
        raise state.engine_problem(may_control=True, session=live)
    try:
        with refused_as("refused", refused):
            return await live.ask(command, SAVE_TIMEOUT_S)
    except EngineFailure as error:
        raise state.engine_problem(may_control=True, session=live) from error
    except TimeoutError as error:
        raise Problem(504, "The engine did not answer in time.", code="timeout") from error


class _Download(StreamingResponse):
    """A file. Gives back its place when it is sent, or the caller has gone or takes nothing."""

    def __init__(
        self, name: str, media_type: str, header: bytes, rest: bytes | memoryview, place: contextlib.AsyncExitStack
    ) -> None:
        async def pieces() -> AsyncIterator[bytes | memoryview]:
            yield header
            for begin in range(0, len(rest), _PIECE):
                yield rest[begin : begin + _PIECE]

        headers = {
            "Content-Length": str(len(header) + len(rest)),
            "Content-Disposition": f'attachment; filename="{name}"',
        }
        super().__init__(pieces(), headers=headers, media_type=media_type)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def within_limit(message: Message) -> None:
            async with asyncio.timeout(SEND_LIMIT_S):
                await send(message)

        async with self._place:
            try:
                await super().__call__(scope, receive, within_limit)
            except TimeoutError:  # the connection is closed, as the response is not complete
                logger.info("A download was given up: nothing of it was taken for %g s.", SEND_LIMIT_S)
