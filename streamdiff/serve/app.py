"""The HTTP surface: page, WHEP, control, health, metrics. Knows nothing about processes, ports or the engine's life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import resources
from io import BytesIO
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from streamdiff.config import Config
from streamdiff.engine.messages import Ready
from streamdiff.errors import EngineFailure
from streamdiff.serve import codecs as known_codecs
from streamdiff.serve.codecs import Codec, Format
from streamdiff.serve.control import MAX_BODY_BYTES, Control, ControlError, Receipt, parse
from streamdiff.serve.hub import DEFAULT_SESSION, Client, Hub
from streamdiff.serve.metrics import Metrics
from streamdiff.serve.problem import Problem, media_type, read_body, respond
from streamdiff.serve.sdp import MAX_SDP_BYTES
from streamdiff.serve.session_view import SessionView
from streamdiff.serve.whep import Viewers

STATIC = resources.files("streamdiff.serve") / "static"
ANSWER_TIMEOUT_S = 5.0
STALLED_S = 2.0
SDP_TYPE = "application/sdp"
TRICKLE_TYPE = "application/trickle-ice-sdpfrag"
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Services:
    """What the routes share. Made on the running event loop."""

    def __init__(self, config: Config, client: Client, ready: Ready, codecs: tuple[Codec, ...], fmt: Format) -> None:
        self.config = config
        self.metrics = Metrics()
        self.codecs = codecs
        self.hub = Hub(config, client, ready, fmt, self.metrics)
        self.viewers = Viewers(config.serve.max_viewers, self.codecs, self.metrics)

    def view(self, request: Request) -> SessionView:
        """The session a request is about.

        Raises:
            Problem: 404.
        """
        session = request.query_params.get("session", DEFAULT_SESSION)
        view = self.hub.view(session)
        if view is None:
            raise Problem(404, f"There is no session {session[:64]!r}; this server has {DEFAULT_SESSION!r}.")
        return view

    def running_view(self, request: Request) -> SessionView:
        """The same, while the engine runs.

        Raises:
            Problem: 404, 503.
        """
        if self.hub.failed is not None:
            raise Problem(503, f"The engine stopped: {self.hub.failed}", {"Retry-After": "5"})
        return self.view(request)


def create_app(config: Config, client: Client, ready: Ready) -> FastAPI:
    """The application; `app.state.services` exists while it runs. `client` is read and written until then.

    Raises:
        ConfigError: no codec, or a size that cannot be encoded.
    """
    codecs, h264 = known_codecs.usable(config.serve.codec, config.serve.encoder)
    fmt = Format(ready.width, ready.height, config.playback.fps, config.serve.scale, config.serve.bitrate, h264)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = Services(config, client, ready, codecs, fmt)
        app.state.services = services
        await services.hub.start()
        try:
            yield
        finally:
            await services.viewers.stop()
            await services.hub.stop()

    app = FastAPI(title="streamdiff", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    app.add_api_route("/", _page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(packages=[("streamdiff.serve", "static")]), name="static")
    app.add_api_route("/whep", _whep_options, methods=["OPTIONS"])
    app.add_api_route("/whep", _whep_describe, methods=["GET", "HEAD"])
    app.add_api_route("/whep", _whep_post, methods=["POST"])
    app.add_api_route("/whep/{id}", _viewer_options, methods=["OPTIONS", "GET", "HEAD"])
    app.add_api_route("/whep/{id}", _viewer_patch, methods=["PATCH"])
    app.add_api_route("/whep/{id}", _viewer_delete, methods=["DELETE"])
    app.add_api_route("/api/state", _state, methods=["GET"])
    app.add_api_route("/api/control", _control, methods=["POST"])
    app.add_api_route("/frame.jpg", _frame, methods=["GET"])
    app.add_api_route("/healthz", _healthz, methods=["GET"])
    app.add_api_route("/readyz", _readyz, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"])
    return app


def _add_errors(app: FastAPI) -> None:
    """Every error is a problem document, and every answer carries the security headers. Mutates: app."""

    async def on_problem(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, Problem)
        return respond(problem)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # The router names the methods of the first route only; an address has several.
            path = request.url.path
            routes = [each for each in app.routes if isinstance(each, Route) and each.path_regex.match(path)]
            headers["allow"] = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
        return respond(Problem(error.status_code, str(error.detail), headers))

    async def add_headers(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call(request)
        response.headers.update(SECURITY_HEADERS)
        cache = "no-cache" if request.url.path.startswith("/static") else "no-store"
        response.headers.setdefault("Cache-Control", cache)
        return response

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.middleware("http")(add_headers)


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def _page() -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html; charset=utf-8")


# ---- WHEP ------------------------------------------------------------------------------------------------------------


async def _whep_options() -> Response:
    return Response(status_code=200, headers={"Accept-Post": SDP_TYPE, "Allow": "OPTIONS, GET, HEAD, POST"})


async def _whep_describe() -> Response:
    return Response(status_code=200, headers={"Content-Type": SDP_TYPE, "Accept-Post": SDP_TYPE})


async def _whep_post(request: Request) -> Response:
    services = _services(request)
    if media_type(request) != SDP_TYPE:
        raise Problem(415, f"An offer is {SDP_TYPE}.", {"Accept-Post": SDP_TYPE})
    offer = _text(await read_body(request, MAX_SDP_BYTES))
    view = services.running_view(request)
    address = request.client.host if request.client else ""
    id, answer = await services.viewers.create(view, offer, address, request.query_params.get("codec"))
    return Response(answer, 201, {"Location": f"/whep/{id}"}, media_type=SDP_TYPE)


async def _viewer_options() -> Response:
    headers = {"Accept-Patch": TRICKLE_TYPE, "Allow": "OPTIONS, GET, HEAD, PATCH, DELETE"}
    return Response(status_code=200, headers=headers)


async def _viewer_patch(request: Request, id: str) -> Response:
    if media_type(request) != TRICKLE_TYPE:
        raise Problem(415, f"A fragment is {TRICKLE_TYPE}.", {"Accept-Patch": TRICKLE_TYPE})
    await _services(request).viewers.trickle(id, _text(await read_body(request, MAX_SDP_BYTES)))
    return Response(status_code=204)


async def _viewer_delete(request: Request, id: str) -> Response:
    await _services(request).viewers.delete(id)
    return Response(status_code=200)


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, "The body is not UTF-8 text.") from error


# ---- control and state -----------------------------------------------------------------------------------------------


async def _state(request: Request) -> Response:
    services = _services(request)
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
    services = _services(request)
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
    picture = _services(request).view(request).picture()
    if picture is None:
        raise Problem(503, "No frame has been made yet.", {"Retry-After": "1"})
    return Response(await asyncio.to_thread(_jpeg, picture), media_type="image/jpeg")


def _jpeg(picture: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=92)
    return file.getvalue()


# ---- health ----------------------------------------------------------------------------------------------------------


async def _healthz() -> Response:
    return JSONResponse({"alive": True})


async def _readyz(request: Request) -> Response:
    services = _services(request)
    view = services.running_view(request)
    if not view.opened:
        raise Problem(503, "The stream is not open yet.", {"Retry-After": "1"})
    stalled_s = view.stalled_s()
    if stalled_s > STALLED_S:
        raise Problem(503, f"The engine has made no frame for {stalled_s:.1f} s.", {"Retry-After": "1"})
    return JSONResponse({"ready": True})


async def _metrics(request: Request) -> Response:
    services = _services(request)
    services.view(request).stats()
    return Response(services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
