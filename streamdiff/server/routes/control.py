"""State and control of one session over HTTP, and the frame on show as a JPEG."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from streamdiff.server.app_state import state_of
from streamdiff.server.problem import Problem, Responses, described, media_type, read_body
from streamdiff.server.routes.apply import REFUSED, bad_control, carry_out, status_of
from streamdiff.server.routes.openapi import BINARY, JSON, answer, body, needs
from streamdiff.server.routes.websocket import control_socket
from streamdiff.server.sessions.control import MAX_BODY_BYTES, ControlError, parse
from streamdiff.server.sessions.control_schema import control_message

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
        "/api/control", _control, methods=["POST"], summary="Say one control message", responses=_LATER | REFUSED,
        **needs("steer", **body(JSON, control_message())),
    )  # fmt: skip
    routes.add_api_route(
        "/frame.jpg", _frame, methods=["GET"], summary="The frame on show", response_class=Response,
        responses=answer("A JPEG file", "image/jpeg", BINARY) | _NOT_SHOWN | _NO_FRAME, **needs("watch"),
    )  # fmt: skip
    routes.add_api_websocket_route("/api/sessions/{session}/control", control_socket)
    return routes


async def _state(request: Request, session: SessionQuery = None) -> Response:
    state = state_of(request)
    live = state.session(request)
    manager = state.manager
    may_control = state.may_control(request, live)
    engine = manager.engine
    reason = None if engine.running else engine.reason_for(may_control)
    return JSONResponse(
        {
            "engine": {"running": engine.running, "reason": reason, **asdict(manager.ready)},
            "state": live.state(may_control),
            "stats": live.stats(),
            "occupancy": list(manager.occupancy),
            "viewers": state.viewers.count,
            "max_viewers": state.config.serve.max_viewers,
            "outputs": [asdict(status) for status in state.outputs.statuses()],
            "codecs_offered": list(state.codecs),
        }
    )


async def _control(request: Request, session: SessionQuery = None) -> Response:
    state = state_of(request)
    live = state.controllable_session(request)
    if media_type(request) != JSON:
        raise Problem(415, "A control message is application/json.")
    try:
        control = parse(await read_body(request, MAX_BODY_BYTES))
    except ControlError as error:
        raise bad_control(state, error) from error
    if control.kind == "get":
        return JSONResponse(live.state(may_control=True))
    receipt = await carry_out(state, live, control)
    return JSONResponse(receipt.message(), status_of([receipt]))


async def _frame(request: Request, session: SessionQuery = None) -> Response:
    jpeg = await state_of(request).session(request).playback.snapshot.jpeg()
    if jpeg is None:
        raise Problem(503, "No frame has been made yet.", {"Retry-After": "1"})
    return Response(jpeg, media_type="image/jpeg")
