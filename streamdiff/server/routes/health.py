"""Liveness, readiness and metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from streamdiff.server.app_state import AppState, state_of
from streamdiff.server.auth import Role
from streamdiff.server.problem import Problem, described
from streamdiff.server.routes.openapi import answer, needs, open_to_all
from streamdiff.server.sessions.live_session import STALLED_S
from streamdiff.server.sessions.manager import DEFAULT_SESSION

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
    """Everybody is answered: probes carry no token. Who may watch is told what is wrong, who may control in the
    engine's own words."""
    state = state_of(request)
    role = state.role(request)
    problem = _unready(state, role is Role.CONTROLLER)
    if problem is None:
        return Readiness()
    if role is Role.NOBODY:
        raise Problem(problem.status, "The server is not ready.", problem.headers)
    raise problem


def _unready(state: AppState, may_control: bool) -> Problem | None:
    """Why the server is not ready; None: it is."""
    manager = state.manager
    if manager.draining and manager.engine.state != "failed":
        return Problem(503, "The server is about to end.", code="draining")
    if not manager.engine.running:
        return state.engine_problem(may_control)
    session = manager.get(DEFAULT_SESSION)
    if session is None:  # it was ended over the API; others may play
        return None
    if not session.opened:
        code = "restarting" if session.engine.state == "restarting" else "opening"
        return Problem(503, "The stream is not open yet.", {"Retry-After": "1"}, code=code)
    if (stalled_s := session.stalled_s()) > STALLED_S:
        message = f"The engine has made no frame for {stalled_s:.1f} s."
        return Problem(503, message, {"Retry-After": "1"}, code="stalled")
    return None


async def _metrics(request: Request) -> Response:
    state = state_of(request)
    state.require(request, Role.VIEWER)
    state.update_metrics()
    sessions = {session.id for session in state.watchable(request)}
    return Response(state.metrics.text(sessions), media_type="text/plain; version=0.0.4; charset=utf-8")
