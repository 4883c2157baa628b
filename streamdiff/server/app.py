"""The FastAPI application: routes, middleware, error handlers. Knows nothing about processes or ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from copy import copy
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles

from streamdiff.config import Config
from streamdiff.engine.process.supervisor import EngineSupervisor
from streamdiff.server.app_state import AppState, state_of
from streamdiff.server.middleware import GuardMiddleware, not_ready
from streamdiff.server.problem import OPENAI, OPENAI_DOCUMENT, PROBLEM_TYPE, Problem, respond, route_path
from streamdiff.server.routes import control, sessions, videos, webrtc
from streamdiff.server.sessions.control import ControlError
from streamdiff.server.sessions.keeper import SnapshotKeeper, find_sessions, open_folders
from streamdiff.version import __version__

STATIC = resources.files("streamdiff.server") / "static"
CORS_ANSWER_HEADERS = (
    *("Location", "Link", "Accept-Post", "Accept-Patch", "Allow", "Retry-After", "WWW-Authenticate"),
    *("Content-Disposition", "Content-Range", "Accept-Ranges", "ETag", "openai-poll-after-ms"),
)


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The API's description, without the 422 that FastAPI adds where an operation has parameters: all are text."""
        described = super().openapi()
        for path, operations in described["paths"].items():
            for responses in (operation["responses"] for operation in operations.values()):
                if responses.get("422", {}).get("description") == "Validation Error":
                    del responses["422"]
                for response in responses.values():
                    if path.startswith(OPENAI) and PROBLEM_TYPE in response.get("content", {}):
                        response["content"] = OPENAI_DOCUMENT
        return described


def create_app(config: Config) -> FastAPI:
    """The application. It answers that the model is loading until an engine is attached (`attach_engine`)."""
    app = _App(title="streamdiff", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    app.state.app_state, app.state.loading = None, not_ready()
    app.state.session_per_visitor = config.serve.session_per_visitor
    routers = [webrtc.watching, webrtc.feeding, sessions.router, control.router, control.probes, videos.router]
    app.add_api_route("/", _page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(packages=[("streamdiff.server", "static")]), name="static")
    routers.append(_heads([route for router in routers for route in router.routes]))
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    _add_errors(app, [route for route in routes if isinstance(route, Route)])
    for router in routers:
        app.include_router(router)
    app.add_middleware(GuardMiddleware, config=config.serve)
    if config.serve.cors_origins:  # without this a browser keeps the pages of other origins out
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.serve.cors_origins,
            allow_methods=["GET", "HEAD", "OPTIONS", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],  # clients send headers of their own, and no answer depends on what a page may forge
            expose_headers=list(CORS_ANSWER_HEADERS),
        )
    return app


@asynccontextmanager
async def attach_engine(app: FastAPI, config: Config, connection: EngineSupervisor) -> AsyncIterator[AppState]:
    """Context manager: serve the sessions of a warm engine. Mutates: app, which answers that the model is loading until
    the default session was requested.

    Raises:
        ConfigError: no codec, a size that cannot be encoded, tokens that cannot be used, or an output that cannot be
            written, a folder for jobs or sessions that cannot be used, a video file for a model that takes none.
    """
    with open_folders(config.serve) as folders:
        keeper = SnapshotKeeper(config.serve, folders, await asyncio.to_thread(find_sessions, folders))
        state = AppState(config, connection, keeper)
        await state.manager.start()
        if state.jobs is not None:
            await state.jobs.start()
        app.state.app_state = state
        try:
            if config.session.input is not None:
                await state.manager.feed_file(config.session.input)
            yield state
        finally:
            if state.jobs is not None:
                await state.jobs.stop()
            for stop in (state.outputs.stop, state.feeders.stop, state.viewers.stop, state.manager.stop):
                await stop()


def _heads(routes: Iterable[BaseRoute]) -> APIRouter:
    """HEAD for every route that has GET; the HTTP server leaves the body out."""
    router = APIRouter()
    for route in routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            head = copy(route)
            head.methods, head.include_in_schema = {"HEAD"}, False
            router.routes.append(head)
    return router


def _add_errors(app: FastAPI, routes: list[Route]) -> None:
    """Every error is a problem document. Mutates: app."""

    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> Response:
        if isinstance(problem, ControlError):
            state_of(request).metrics.controls.labels("any", problem.code).inc()
        return respond(problem, route_path(request.scope))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return respond(
            Problem(400, f"`{name}`: {first['msg']}.", code="invalid", field=name), route_path(request.scope)
        )

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:
            # The router names the methods of the first route only; an address has several. Files name none.
            path = route_path(request.scope)
            known = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
            headers["allow"] = ", ".join(sorted(known or {"GET", "HEAD"}))
        return respond(Problem(error.status_code, str(error.detail), headers), route_path(request.scope))


async def _page(request: Request) -> Response:
    page = (STATIC / "index.html").read_bytes()
    if request.app.state.session_per_visitor:  # the page opens it
        page = page.replace(b"<html", b"<html data-own-session", 1)
    return Response(page, media_type="text/html; charset=utf-8")
