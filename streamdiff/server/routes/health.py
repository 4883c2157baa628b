"""Whether the server lives, whether it is ready, and its metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from streamdiff.server.app_state import AppState, services_of
from streamdiff.server.auth import Role
from streamdiff.server.problem import Problem, described
from streamdiff.server.routes.openapi import answer, needs, open_to_all
from streamdiff.server.sessions.manager import DEFAULT_SESSION

STALLED_S = 2.0

_WRONG_TOKEN = described(s401="This takes a token")
_NOT_READY = described(s503="`code` says what is the matter, for those who may watch; Retry-After: when to ask again")


class Health(BaseModel):
    """The web process lives."""

    alive: Literal[True] = True


class Readiness(BaseModel):
    """The engine makes video."""

    ready: Literal[True] = True


def router() -> APIRouter:
    """`/healthz`, `/readyz` and `/metrics`."""
    routes = APIRouter(tags=["health"])
    routes.add_api_route(
        "/healthz", _healthz, methods=["GET"], summary="Whether the web process lives", response_model=Health,
        **open_to_all(),
    )  # fmt: skip
    routes.add_api_route(
        "/readyz", _readyz, methods=["GET"], summary="Whether viewers can be sent here", response_model=Readiness,
        responses=_NOT_READY | _WRONG_TOKEN, **needs("steer", optional=True),
    )  # fmt: skip
    routes.add_api_route(
        "/metrics", _metrics, methods=["GET"], summary="Figures for Prometheus", response_class=Response,
        responses=answer("Prometheus' text format", "text/plain") | _WRONG_TOKEN, **needs("watch"),
    )  # fmt: skip
    return routes


async def _healthz() -> Health:
    return Health()


async def _readyz(request: Request) -> Readiness:
    """Everybody is answered: probes carry no token. What is the matter is told to those who may watch, the engine's own
    words to those who may steer."""
    services = services_of(request)
    role = services.role(request)
    problem = _unready(services, role is Role.CONTROLLER)
    if problem is None:
        return Readiness()
    if role is Role.NOBODY:
        raise Problem(problem.status, "The server is not ready.", problem.headers)
    raise problem


def _unready(services: AppState, may_control: bool) -> Problem | None:
    """Why nobody should be sent here; None: all is well."""
    hub = services.hub
    if hub.failed is not None:
        return services.lost("failed", hub.failed, may_control)
    if hub.draining:
        return Problem(503, "The server is about to end.", code="draining")
    if hub.restarting is not None:
        return services.lost("restarting", hub.restarting.reason, may_control)
    view = hub.view(DEFAULT_SESSION)
    if view is None:  # it was ended over the API; others may play
        return None
    if not view.opened:
        code = "restarting" if view.engine == "restarting" else "opening"
        return Problem(503, "The stream is not open yet.", {"Retry-After": "1"}, code=code)
    stalled_s = view.stalled_s()
    if stalled_s > STALLED_S:
        message = f"The engine has made no frame for {stalled_s:.1f} s."
        return Problem(503, message, {"Retry-After": "1"}, code="stalled")
    return None


async def _metrics(request: Request) -> Response:
    services = services_of(request)
    services.require(request, Role.VIEWER)
    services.measure()
    sessions = {view.session for view in services.watchable(request)}
    return Response(services.metrics.text(sessions), media_type="text/plain; version=0.0.4; charset=utf-8")
