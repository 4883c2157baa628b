"""Sessions over HTTP: open, list, show, change, pause, begin afresh, end. Knows nothing about viewers' connections."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from streamdiff import clock
from streamdiff.errors import RequestError
from streamdiff.server.app_state import AppState, refusals, services_of
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
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import SessionUnavailable
from streamdiff.server.sessions.spec import SessionSpec


def router() -> APIRouter:
    """The routes under `/api/sessions`."""
    routes = APIRouter(prefix="/api/sessions", tags=["sessions"], responses=_PROBLEMS)
    routes.add_api_route(
        "", _list, methods=["GET"], response_model=SessionList, summary="All that the caller may watch",
        **needs("watch"),
    )  # fmt: skip
    routes.add_api_route(
        "", _open, methods=["POST"], status_code=201, response_model=OpenedSession, summary="Open a session",
        responses=_BAD_BODY | _NO_PLACE, **needs("steer", **body(JSON, NewSession.model_json_schema(), required=False)),
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
    for kind, says in (("pause", "Hold it"), ("resume", "Let it go on"), ("reset", "Begin afresh")):
        act = _act(kind)  # type: ignore[arg-type]
        name = f"{kind}_session"
        routes.add_api_route(
            f"{one}/{kind}", act, methods=["POST"], response_model=Receipts, summary=says, name=name,
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
_NO_PLACE = described(
    s503="No place: `code` is time, memory, draining, restarting or engine; Retry-After: when to ask again"
)


async def _read(request: Request, model: type[BodyT]) -> BodyT:
    given = await read_body(request, MAX_BODY_BYTES)
    if given and media_type(request) != JSON:
        raise Problem(415, f"The body is {JSON}.")
    return read(model, given)


def info_of(services: AppState, view: LiveSession) -> SessionInfo:
    """A session as the API shows it."""
    now_s = clock.monotonic_s()
    lifetime = services.hub.lifetime(view.session)
    lifetime.watch(view.watched, now_s)
    end = lifetime.end()
    state = view.state(may_control=False)  # of the engine it tells nothing
    shown = {name: state[name] for name in SessionInfo.model_fields if name in state}
    return SessionInfo(
        **shown,
        id=view.session,
        watched=view.watched,
        age_s=round(now_s - lifetime.opened_s, 1),
        ends_in_s=None if end is None else round(max(0.0, end[0] - now_s), 1),
        share=round(services.hub.share(view.fps, view.steps), 4),
        whep=f"/whep/{view.session}",
        control=f"/api/sessions/{view.session}/control",
        stats=view.stats(),
    )


def _capacity(services: AppState) -> CapacityInfo:
    hub, ready = services.hub, services.hub.ready
    return CapacityInfo(
        room=hub.room(),
        work_s=hub.work_s(),
        chunk_frames=ready.chunk_frames,
        share=round(sum(hub.shares()), 4),
        share_limit=hub.capacity.limit,
        occupancy=[round(share, 3) for share in hub.occupancy],
        sessions_fit=ready.sessions_fit,
        size=f"{ready.width}x{ready.height}",
        steps=list(ready.steps_known),
        native_fps=ready.native_fps,
        draining=hub.draining,
    )


async def _list(request: Request) -> SessionList:
    services = services_of(request)
    services.require(request, Role.VIEWER)
    sessions = [info_of(services, view) for view in services.watchable(request)]
    return SessionList(sessions=sessions, capacity=_capacity(services))


async def _open(request: Request) -> Response:
    services = services_of(request)
    with refusals(services.metrics.refused):
        return await _open_here(services, request)


async def _open_here(services: AppState, request: Request) -> Response:
    services.require(request, Role.CONTROLLER)
    services.limit(request)
    wanted = await _read(request, NewSession)
    check_new(wanted, services.hub.ready)
    defaults = services.config
    spec = SessionSpec(
        prompt=defaults.session.prompt if wanted.prompt is None else wanted.prompt,
        seed=wanted.seed,
        fps=defaults.playback.fps if wanted.fps is None else wanted.fps,
        steps=wanted.steps,
        kv_context=wanted.kv_context,
    )
    try:
        view = await services.hub.open(spec)
    except SessionUnavailable as error:
        raise Problem(503, str(error), {"Retry-After": str(error.retry_after_s)}, code=error.code) from error
    except RequestError as error:
        raise Problem(422, str(error), code="refused", field=error.field) from error
    assert view.tokens is not None
    keys = {"view_token": view.tokens.view, "control_token": view.tokens.control}
    body = OpenedSession.model_validate(info_of(services, view).model_dump() | keys).model_dump()
    return JSONResponse(body, 201, {"Location": f"/api/sessions/{view.session}"})


async def _show(request: Request, session: str) -> SessionInfo:
    services = services_of(request)
    return info_of(services, services.view(request))


async def _change(request: Request, response: Response, session: str) -> Receipts:
    services = services_of(request)
    view = services.controlled_view(request)
    change = await _read(request, SessionChange)
    controls = controls_of(change, services.hub.ready)
    return await _obey(services, view, controls, response)


async def _obey(services: AppState, view: LiveSession, controls: list[ControlMessage], response: Response) -> Receipts:
    """Have all obeyed, in order; the response's status says whether some is still to come. Mutates: response."""
    receipts = [await carry_out(services, view, control) for control in controls]
    if view.closed:
        raise Problem(410, "The session has ended.", code="ended")
    response.status_code = status_of(receipts)
    return Receipts(receipts=[receipt.message() for receipt in receipts], session=info_of(services, view))


def _act(kind: Kind) -> Any:
    async def act(request: Request, response: Response, session: str) -> Receipts:
        services = services_of(request)
        return await _obey(services, services.controlled_view(request), [ControlMessage(kind)], response)

    return act


async def _end(request: Request, session: str) -> EndedSession:
    services = services_of(request)
    services.limit(request)
    if services.hub.end_of(session) is None:
        services.require(request, Role.CONTROLLER, services.view(request))
        await services.hub.end(session, "deleted")
    return EndedSession(id=session, ended=services.hub.end_of(session) or "deleted")
