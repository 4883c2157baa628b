"""State and control of one session over HTTP, and the picture on show. Knows nothing about viewers' connections."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.websockets import WebSocket

from streamdiff.errors import EngineFailure
from streamdiff.serve.control import MAX_BODY_BYTES, Control, ControlError, Receipt, parse
from streamdiff.serve.control_schema import control_message
from streamdiff.serve.control_socket import ControlSocket
from streamdiff.serve.engine_state import reason_for
from streamdiff.serve.openapi import BINARY, JSON, answer, body, needs
from streamdiff.serve.peers import address_of
from streamdiff.serve.problem import Problem, Responses, described, media_type, read_body, respond
from streamdiff.serve.services import SOCKET_PROTOCOL, Services, services_of
from streamdiff.serve.session_spec import SessionEnded
from streamdiff.serve.session_view import SessionView

ANSWER_TIMEOUT_S = 5.0
"""How long a caller waits for the engine's answer before it is told that it comes later."""
_REFUSED = described(
    s400="Not JSON, or no object",
    s401="This takes a token",
    s403="The token is good for watching only, or the page is of another origin",
    s404="No such session",
    s409="The session has another revision than `if_rev`",
    s410="The session has ended",
    s413="The body is too large",
    s415="The body is not application/json",
    s422="A field is wrong, and `field` names it, or the model has refused",
    s429="Too many messages from one address; Retry-After: when to go on",
    s503="The engine has ended or is started again; Retry-After: when to ask again",
    s504="The engine took no command in time; this one may still be carried out",
)
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


def bad_control(services: Services, error: ControlError) -> Problem:
    """What a message that is not obeyed is answered."""
    services.metrics.controls.labels("any", error.code).inc()
    known = {"bad_json": 400, "bad_message": 400, "conflict": 409}
    waits = {"no_capacity": services.hub.retry_after_s(), "restarting": services.restart_s(), "engine_ended": 5}
    headers = {"Retry-After": str(waits[error.code])} if error.code in waits else {}
    status = 503 if error.code in waits else known.get(error.code, 422)
    return Problem(status, str(error), headers, code=error.code, field=error.field, id=error.id)


def status_of(receipts: list[Receipt]) -> int:
    """200 when all was accepted, 202 while some is still to come."""
    return 202 if any(receipt.stage == "asked" for receipt in receipts) else 200


async def carry_out(services: Services, view: SessionView, control: Control) -> Receipt:
    """Have a message obeyed; the receipt says `accepted`, or `asked` when the engine has it and takes its time.

    Raises:
        Problem: it was refused (422, 409), the session has ended (410) or the engine (503, 504).
    """
    try:
        receipt = await view.control_and_wait(control, f"http-{id(control)}", ANSWER_TIMEOUT_S)
    except ControlError as error:
        raise bad_control(services, error) from error
    except TimeoutError as error:
        message = f"The engine took no command for {ANSWER_TIMEOUT_S:g} s; this one may still be carried out."
        raise Problem(504, message, code="engine") from error
    except SessionEnded as error:
        raise Problem(410, "The session has ended.", code="ended") from error
    except EngineFailure as error:
        raise Problem(503, f"The engine stopped: {error}", {"Retry-After": "5"}, code="engine") from error
    if receipt.stage == "refused":
        raise Problem(422, receipt.reason, code="refused", field=receipt.field, id=receipt.id)
    return receipt


async def _socket(socket: WebSocket) -> None:
    """The control WebSocket of a session. It is refused with a problem document before it is accepted."""
    services: Services = socket.app.state.services
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
