"""State and control over HTTP, and the picture on show. Knows nothing about viewers' connections."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from io import BytesIO
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image

from streamdiff.errors import EngineFailure
from streamdiff.serve.control import MAX_BODY_BYTES, Control, ControlError, Receipt, parse
from streamdiff.serve.problem import Problem, media_type, read_body
from streamdiff.serve.services import services_of
from streamdiff.serve.session_view import SessionView

ANSWER_TIMEOUT_S = 5.0


def router() -> APIRouter:
    """The routes under `/api`, and `/frame.jpg`."""
    routes = APIRouter()
    routes.add_api_route("/api/state", _state, methods=["GET"])
    routes.add_api_route("/api/control", _control, methods=["POST"])
    routes.add_api_route("/frame.jpg", _frame, methods=["GET"])
    return routes


async def _state(request: Request) -> Response:
    services = services_of(request)
    view = services.view(request)
    failed = services.hub.failed
    return JSONResponse(
        {
            "engine": {"running": failed is None, "reason": failed, **asdict(services.hub.ready)},
            "state": view.state(),
            "stats": view.stats(),
            "viewers": services.viewers.count,
            "max_viewers": services.config.serve.max_viewers,
            "codecs_offered": list(services.codecs),
        }
    )


async def _control(request: Request) -> Response:
    services = services_of(request)
    if media_type(request) != "application/json":
        raise Problem(415, "A control message is application/json.")
    body = await read_body(request, MAX_BODY_BYTES)
    view = services.running_view(request)
    try:
        control = parse(body)
    except ControlError as error:
        services.metrics.controls.labels("any", error.code).inc()
        status = 400 if error.code in ("bad_json", "bad_message") else 422
        raise Problem(status, str(error), code=error.code, field=error.field, id=error.id) from error
    if control.kind == "get":
        return JSONResponse(view.state())
    receipt = await _ask(view, control)
    if receipt.stage == "refused":
        raise Problem(422, receipt.reason, code="refused", field=receipt.field, id=receipt.id)
    return JSONResponse(receipt.message())


async def _ask(view: SessionView, control: Control) -> Receipt:
    try:
        return await view.control_and_wait(control, f"http-{id(control)}", ANSWER_TIMEOUT_S)
    except TimeoutError as error:
        raise Problem(504, "The engine did not answer in time; the request may still be carried out.") from error
    except EngineFailure as error:
        raise Problem(503, f"The engine stopped: {error}", {"Retry-After": "5"}) from error


async def _frame(request: Request) -> Response:
    picture = services_of(request).view(request).picture()
    if picture is None:
        raise Problem(503, "No frame has been made yet.", {"Retry-After": "1"})
    return Response(await asyncio.to_thread(_jpeg, picture), media_type="image/jpeg")


def _jpeg(picture: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=92)
    return file.getvalue()
