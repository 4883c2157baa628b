"""`/api/sessions`: open, list, show, change, pause, reset and end sessions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from streamdiff import clock
from streamdiff.errors import RequestError
from streamdiff.server.app_state import AppState, refusals, state_of
from streamdiff.server.auth import Role
from streamdiff.server.problem import Problem, Responses, described, media_type, read_body
from streamdiff.server.routes.apply import carry_out, status_of
from streamdiff.server.routes.openapi import JSON, body, needs
from streamdiff.server.routes.schemas import (
    BodyT,
    CapacityInfo,
    EndedSession,
    NewSession,
    OpenedSession,
    Receipts,
    SessionChange,
    SessionInfo,
    SessionList,
    check_new,
    controls_of,
    read,
)
from streamdiff.server.sessions.control import MAX_BODY_BYTES, ControlMessage, Kind
from streamdiff.server.sessions.live_session import LiveSession, SessionSpec
from streamdiff.server.sessions.manager import SessionUnavailable


def router() -> APIRouter:
    """The routes under `/api/sessions`."""
    routes = APIRouter(prefix="/api/sessions", tags=["sessions"], responses=_PROBLEMS)
    routes.add_api_route(
        "", _list, methods=["GET"], response_model=SessionList, summary="All that the caller may watch",
        **needs("watch"),
    )  # fmt: skip
    routes.add_api_route(
        "", _open, methods=["POST"], status_code=201, response_model=OpenedSession, summary="Open a session",
        responses=_BAD_BODY | _UNAVAILABLE,
        **needs("steer", **body(JSON, NewSession.model_json_schema(), required=False)),
    )  # fmt: skip
    one = "/{session}"
    routes.add_api_route(
        one, _show, methods=["GET"], response_model=SessionInfo, summary="One session", **needs("watch")
    )
    routes.add_api_route(
        one, _change, methods=["PATCH"], response_model=Receipts, summary="Change it while it plays",
        responses=_BAD_BODY | _LATER | _STALE | _NO_ENGINE,
        **needs("steer", **body(JSON, SessionChange.model_json_schema())),
    )  # fmt: skip
    routes.add_api_route(one, _end, methods=["DELETE"], response_model=EndedSession, summary="End it", **needs("steer"))
    for kind, summary in (("pause", "Hold it"), ("resume", "Let it go on"), ("reset", "Begin afresh")):
        act = _act(kind)  # type: ignore[arg-type]
        name = f"{kind}_session"
        routes.add_api_route(
            f"{one}/{kind}", act, methods=["POST"], response_model=Receipts, summary=summary, name=name,
            responses=_LATER | _NO_ENGINE, **needs("steer"),
        )  # fmt: skip
    return routes


_PROBLEMS = described(
    s401="This takes a token",
    s403="The token is good for watching only, or the page is of another origin",
    s404="No such session",
    s410="It has ended; `reason` says why",
    s422="A field is wrong; `field` names it",
    s429="Too many changes from one address; Retry-After: when to go on",
)
_BAD_BODY = described(
    s400="The body is not JSON", s413="The body is too large", s415="The body is not application/json"
)
_NO_ENGINE = described(
    s503="The engine has ended or is started again; Retry-After: when to ask again",
    s504="The engine took no command in time; this one may still be carried out",
)
_STALE = described(s409="The session has another revision than `if_rev`")
_LATER: Responses = {
    202: {
        "description": "The engine has it and carries it out later (receipt `asked`). GET shows what holds by then",
        "model": Receipts,
    }
}
_UNAVAILABLE = described(
    s503="No place: `code` is time, memory, draining, restarting or engine; Retry-After: when to ask again"
)


async def _read(request: Request, model: type[BodyT]) -> BodyT:
    given = await read_body(request, MAX_BODY_BYTES)
    if given and media_type(request) != JSON:
        raise Problem(415, f"The body is {JSON}.")
    return read(model, given)


def info_of(state: AppState, session: LiveSession) -> SessionInfo:
    """A session as the API shows it."""
    now_s = clock.monotonic_s()
    session.lifetime.watch(session.watched, now_s)
    end = session.lifetime.end()
    facts = session.state(may_control=False)  # without the engine's reason
    return SessionInfo(
        **{name: facts[name] for name in SessionInfo.model_fields if name in facts},
        id=session.id,
        watched=session.watched,
        age_s=round(now_s - session.lifetime.opened_s, 1),
        ends_in_s=None if end is None else round(max(0.0, end[0] - now_s), 1),
        share=round(state.manager.share(session.fps, session.steps), 4),
        whep=f"/whep/{session.id}",
        control=f"/api/sessions/{session.id}/control",
        stats=session.stats(),
    )


def _capacity(state: AppState) -> CapacityInfo:
    manager, ready = state.manager, state.manager.ready
    return CapacityInfo(
        room=manager.free_sessions(),
        work_s=manager.capacity.work_s(clock.monotonic_s()),
        chunk_frames=ready.chunk_frames,
        share=round(sum(manager.shares()), 4),
        share_limit=manager.capacity.limit,
        occupancy=[round(share, 3) for share in manager.occupancy],
        sessions_fit=ready.sessions_fit,
        size=f"{ready.width}x{ready.height}",
        steps=list(ready.steps_known),
        native_fps=ready.native_fps,
        draining=manager.draining,
    )


async def _list(request: Request) -> SessionList:
    state = state_of(request)
    state.require(request, Role.VIEWER)
    sessions = [info_of(state, session) for session in state.watchable(request)]
    return SessionList(sessions=sessions, capacity=_capacity(state))


async def _open(request: Request) -> Response:
    state = state_of(request)
    with refusals(state.metrics.refused):
        return await _open_checked(state, request)


async def _open_checked(state: AppState, request: Request) -> Response:
    state.require(request, Role.CONTROLLER)
    state.limit(request)
    wanted = await _read(request, NewSession)
    check_new(wanted, state.manager.ready)
    defaults = state.config
    spec = SessionSpec(
        prompt=defaults.session.prompt if wanted.prompt is None else wanted.prompt,
        seed=wanted.seed,
        fps=defaults.playback.fps if wanted.fps is None else wanted.fps,
        steps=wanted.steps,
        kv_context=wanted.kv_context,
    )
    try:
        session = await state.manager.open(spec)
    except SessionUnavailable as error:
        raise Problem(503, str(error), {"Retry-After": str(error.retry_after_s)}, code=error.code) from error
    except RequestError as error:
        raise Problem(422, str(error), code="refused", field=error.field) from error
    assert session.tokens is not None
    keys = {"view_token": session.tokens.view, "control_token": session.tokens.control}
    body = OpenedSession.model_validate(info_of(state, session).model_dump() | keys).model_dump()
    return JSONResponse(body, 201, {"Location": f"/api/sessions/{session.id}"})


async def _show(request: Request, session: str) -> SessionInfo:
    state = state_of(request)
    return info_of(state, state.session(request))


async def _change(request: Request, response: Response, session: str) -> Receipts:
    state = state_of(request)
    live = state.controllable_session(request)
    change = await _read(request, SessionChange)
    return await _carry_out_all(state, live, controls_of(change, state.manager.ready), response)


async def _carry_out_all(
    state: AppState, session: LiveSession, controls: list[ControlMessage], response: Response
) -> Receipts:
    """Carry out all, in order; the response's status says whether some is still to come. Mutates: response."""
    receipts = [await carry_out(state, session, control) for control in controls]
    if session.closed:
        raise Problem(410, "The session has ended.", code="ended")
    response.status_code = status_of(receipts)
    return Receipts(receipts=[receipt.message() for receipt in receipts], session=info_of(state, session))


def _act(kind: Kind) -> Any:
    async def act(request: Request, response: Response, session: str) -> Receipts:
        state = state_of(request)
        return await _carry_out_all(state, state.controllable_session(request), [ControlMessage(kind)], response)

    return act


async def _end(request: Request, session: str) -> EndedSession:
    state = state_of(request)
    state.limit(request)
    if state.manager.end_reason(session) is None:
        state.require(request, Role.CONTROLLER, state.session(request))
        await state.manager.end(session, "deleted")
    return EndedSession(id=session, ended=state.manager.end_reason(session) or "deleted")
