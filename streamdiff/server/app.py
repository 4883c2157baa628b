"""The web application: its parts put together, its errors and headers. Knows nothing about processes or ports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from streamdiff.config import Config
from streamdiff.engine.messages import Ready
from streamdiff.server.app_state import AppState
from streamdiff.server.auth import read_tokens
from streamdiff.server.hosts import HostPolicy
from streamdiff.server.media import codecs as known_codecs
from streamdiff.server.media.codecs import Format
from streamdiff.server.middleware import GuardMiddleware, Notice
from streamdiff.server.outputs import target
from streamdiff.server.problem import Problem, respond
from streamdiff.server.routes import control, health, sessions, whep
from streamdiff.server.sessions.manager import EngineConnection
from streamdiff.version import __version__

STATIC = resources.files("streamdiff.server") / "static"
CORS_REQUEST_HEADERS = ("Authorization", "Content-Type", "If-Match")
CORS_ANSWER_HEADERS = ("Location", "Link", "Accept-Post", "Accept-Patch", "Allow", "Retry-After", "WWW-Authenticate")


def create_app(config: Config) -> FastAPI:
    """The application. It answers that the model is loading until an engine is attached (`attach_engine`)."""
    app = FastAPI(
        title="streamdiff",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    app.state.services, app.state.notice = None, Notice()
    routers = [part.router() for part in (whep, sessions, control, health)]
    app.add_api_route("/", _page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(packages=[("streamdiff.server", "static")]), name="static")
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    _add_errors(app, [route for route in routes if isinstance(route, Route)])
    for router in routers:
        app.include_router(router)
    app.add_middleware(GuardMiddleware, hosts=HostPolicy.of(config.serve), origins=config.serve.cors_origins)
    if config.serve.cors_origins:
        _allow_origins(app, config.serve.cors_origins)
    return app


@asynccontextmanager
async def attach_engine(
    app: FastAPI, config: Config, client: EngineConnection, ready: Ready
) -> AsyncIterator[AppState]:
    """Serve a warm engine's sessions, meanwhile; `client` is read and written. Mutates: app, whose state has the
    services from the moment on when the first session was asked for.

    Raises:
        ConfigError: no codec, a size that cannot be encoded, tokens that cannot be used, or an output that cannot be
            written.
    """
    codecs, encoder = known_codecs.usable(config.serve.codec, config.serve.encoder)
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"encoder": encoder})})
    Format(ready.width, ready.height, config.playback.fps, config.scale, config.serve.bitrate)  # or its error
    outputs = target.parse_all(config.serve.outputs)
    services = AppState(config, client, ready, codecs, read_tokens(config.serve), outputs)
    await services.hub.start()
    app.state.services = services
    try:
        yield services
    finally:
        await services.outputs.stop()
        await services.viewers.stop()
        await services.hub.stop()


def _add_errors(app: FastAPI, routes: list[Route]) -> None:
    """Every error is a problem document. Mutates: app."""

    async def on_problem(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, Problem)
        return respond(problem)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:
            # The router names the methods of the first route only; an address has several. Files name none.
            path = request.url.path
            known = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
            headers["allow"] = ", ".join(sorted(known or {"GET", "HEAD"}))
        return respond(Problem(error.status_code, str(error.detail), headers))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)


def _allow_origins(app: FastAPI, origins: list[str]) -> None:
    """Let pages of these origins use the server; without it a browser keeps them out. Mutates: app."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "OPTIONS", "POST", "PATCH", "DELETE"],
        allow_headers=list(CORS_REQUEST_HEADERS),
        expose_headers=list(CORS_ANSWER_HEADERS),
    )


async def _page() -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html; charset=utf-8")
