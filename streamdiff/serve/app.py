"""The web application: its parts put together, its errors and headers. Knows nothing about processes or ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from streamdiff.config import Config
from streamdiff.engine.messages import Ready
from streamdiff.serve import codecs as known_codecs
from streamdiff.serve import routes_control, routes_health, routes_sessions, routes_whep, targets
from streamdiff.serve.access import read_tokens
from streamdiff.serve.codecs import Format
from streamdiff.serve.hub import Client
from streamdiff.serve.problem import Problem, is_own_page, respond
from streamdiff.serve.services import Services
from streamdiff.version import __version__

STATIC = resources.files("streamdiff.serve") / "static"
CORS_REQUEST_HEADERS = ("Authorization", "Content-Type", "If-Match")
CORS_ANSWER_HEADERS = ("Location", "Link", "Accept-Post", "Accept-Patch", "Allow", "Retry-After", "WWW-Authenticate")
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def create_app(config: Config, client: Client, ready: Ready) -> FastAPI:
    """The application; `app.state.services` exists while it runs. `client` is read and written until then.

    Raises:
        ConfigError: no codec, a size that cannot be encoded, tokens that cannot be used, or an output that cannot be
            written.
    """
    codecs, encoder = known_codecs.usable(config.serve.codec, config.serve.encoder)
    tokens = read_tokens(config.serve)
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"encoder": encoder})})
    Format(ready.width, ready.height, config.playback.fps, config.scale, config.serve.bitrate)  # or its error

    outputs = targets.parse_all(config.serve.outputs)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = Services(config, client, ready, codecs, tokens, outputs)
        app.state.services = services
        await services.hub.start()
        try:
            yield
        finally:
            await services.outputs.stop()
            await services.viewers.stop()
            await services.hub.stop()

    app = FastAPI(
        title="streamdiff",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    routers = [part.router() for part in (routes_whep, routes_sessions, routes_control, routes_health)]
    _add_errors(
        app,
        [route for routes in routers for route in routes.routes if isinstance(route, Route)],
        config.serve.cors_origins,
    )
    app.add_api_route("/", _page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(packages=[("streamdiff.serve", "static")]), name="static")
    for routes in routers:
        app.include_router(routes)
    if config.serve.cors_origins:
        _allow_origins(app, config.serve.cors_origins)
    return app


def _add_errors(app: FastAPI, routes: list[Route], origins: list[str]) -> None:
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
            known = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
            headers["allow"] = ", ".join(sorted(known)) or headers.get("allow", "")
        return respond(Problem(error.status_code, str(error.detail), headers))

    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.method not in ("GET", "HEAD", "OPTIONS") and not is_own_page(request, origins):
            foreign = request.headers["origin"]
            return respond(Problem(403, f"Pages of {foreign[:80]!r} may not use this server.", code="origin"))
        return await call(request)

    async def add_headers(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call(request)
        response.headers.update(SECURITY_HEADERS)
        cache = "no-cache" if request.url.path.startswith("/static") else "no-store"
        response.headers.setdefault("Cache-Control", cache)
        return response

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.middleware("http")(guard)
    app.middleware("http")(add_headers)


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
