"""State and control of one session over HTTP, and the picture on show. Knows nothing about viewers' connections."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.websockets import WebSocket

from streamdiff.server.app_state import SOCKET_PROTOCOL, AppState, services_of
from streamdiff.server.peers import address_of
from streamdiff.server.problem import Problem, Responses, described, media_type, read_body, respond
from streamdiff.server.routes.apply import _REFUSED, bad_control, carry_out, status_of
from streamdiff.server.routes.openapi import BINARY, JSON, answer, body, needs
from streamdiff.server.routes.websocket import ControlSocket
from streamdiff.server.sessions.control import MAX_BODY_BYTES, ControlError, parse
from streamdiff.server.sessions.control_schema import control_message
from streamdiff.server.sessions.engine_state import reason_for

_LATER: Responses = {202: {"description": "The engine has it and carries it out later (receipt `asked`)"}}


_NOT_SHOWN = described(s401="This takes a token", s404="No such session", s410="The session has ended")


_NO_FRAME = described(s503="No frame has been made yet; Retry-After: when to ask again")


SessionQuery = Annotated[str | None, Query(description="which one; left out: the default session")]


def router() -> APIRouter:
    """`/api/state`, `/api/control` and `/frame.jpg`: the default session's, or that of `?session=`; and WebSockets."""
    routes = APIRouter(tags=["control"])
    routes.add_api_route(
        "/api/state", _state, methods=["GET"], summary="Everything that a page needs to draw itself",
        responses=_NOT_SHOWN, **needs("watch"),
    )  # fmt: skip
    routes.add_api_route(
        "/api/control", _control, methods=["POST"], summary="Say one control message", responses=_LATER | _REFUSED,
        **needs("steer", **body(JSON, control_message())),
    )  # fmt: skip
    routes.add_api_route(
        "/frame.jpg", _frame, methods=["GET"], summary="The frame on show", response_class=Response,
        responses=answer("A JPEG file", "image/jpeg", BINARY) | _NOT_SHOWN | _NO_FRAME, **needs("watch"),
    )  # fmt: skip
    routes.add_api_websocket_route("/api/sessions/{session}/control", _socket)
    return routes


async def _state(request: Request, session: SessionQuery = None) -> Response:
    services = services_of(request)
    view = services.view(request)
    hub = services.hub
    may_control = services.may_control(request, view)
    reason = hub.failed or (hub.restarting.reason if hub.restarting else None)
    told = None if reason is None else reason_for(reason, may_control)
    return JSONResponse(
        {
            "engine": {"running": reason is None, "reason": told, **asdict(hub.ready)},
            "state": view.state(may_control),
            "stats": view.stats(),
            "occupancy": list(hub.occupancy),
            "viewers": services.viewers.count,
            "max_viewers": services.config.serve.max_viewers,
            "outputs": [asdict(sent) for sent in services.outputs.states()],
            "codecs_offered": list(services.codecs),
        }
    )


async def _control(request: Request, session: SessionQuery = None) -> Response:
    services = services_of(request)
    view = services.controlled_view(request)
    if media_type(request) != JSON:
        raise Problem(415, "A control message is application/json.")
    message = await read_body(request, MAX_BODY_BYTES)
    try:
        control = parse(message)
    except ControlError as error:
        raise bad_control(services, error) from error
    if control.kind == "get":
        return JSONResponse(view.state(may_control=True))
    receipt = await carry_out(services, view, control)
    return JSONResponse(receipt.message(), status_of([receipt]))


async def _socket(socket: WebSocket) -> None:
    """The control WebSocket of a session. It is refused with a problem document before it is accepted."""
    services: AppState = socket.app.state.services
    try:
        places, address = services.sockets, address_of(socket)
        if (refusal := places.refusal(address)) is not None:
            raise refusal
        view = services.running_view(socket)
        may_control = services.may_control(socket, view)
    except Problem as problem:
        services.metrics.sockets_refused.labels(problem.code).inc()
        await socket.send_denial_response(respond(problem))
        return
    places.take(address)
    try:
        offered = socket.scope["subprotocols"]
        await socket.accept(SOCKET_PROTOCOL if SOCKET_PROTOCOL in offered else None)
        end = await ControlSocket(socket, view, services.metrics, may_control).run()
        if end == "session_ended":
            await socket.close(1000, "the session has ended")
    finally:
        places.leave(address)


async def _frame(request: Request, session: SessionQuery = None) -> Response:
    jpeg = await services_of(request).view(request).snapshot.jpeg()
    if jpeg is None:
        raise Problem(503, "No frame has been made yet.", {"Retry-After": "1"})
    return Response(jpeg, media_type="image/jpeg")
