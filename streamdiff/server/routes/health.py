"""Liveness, readiness and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from streamdiff.config import ServeConfig
from streamdiff.server.app_state import AppState
from streamdiff.server.auth import Role
from streamdiff.server.problem import Problem
from streamdiff.server.routes.dependencies import State, answer, operation
from streamdiff.server.routes.schemas import Answer
from streamdiff.server.sessions.live_session import STALLED_S
from streamdiff.server.sessions.manager import DEFAULT_SESSION


class Health(Answer):
    """The web process lives."""

    alive: Literal[True] = True


class Readiness(Answer):
    """The engine makes video."""

    ready: Literal[True] = True
    waiting: list[str] = Field([])
    """sessions that are opened when there is memory, of those whose token is shown; they were open before a restart
    of the engine or the server"""


router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Whether the web process lives", **operation(None))
async def healthz() -> Health:
    return Health()


@router.get(
    "/health", summary="The same as /readyz, as vLLM calls it", **operation("steer", 503, optional=True)
)  # fmt: skip
@router.get("/readyz", summary="Whether viewers can be sent here", **operation("steer", 503, optional=True))
async def readyz(request: Request, state: State) -> Readiness:
    """Answered without a token too, as probes have none. With a token that may watch it says what is wrong, with one
    that may steer in the engine's own words."""
    role = state.role(request)
    known = {session.id for session in state.watchable(request)}
    problem = _unready(state, role is Role.CONTROLLER, known)
    if problem is None:
        return Readiness(waiting=[session.id for session in state.manager.waiting if session.id in known])
    if role is Role.NOBODY:
        raise Problem(problem.status, "The server is not ready.", problem.headers)
    raise problem


@router.get(
    "/metrics", summary="Figures for Prometheus", response_class=Response,
    **operation("watch", answers=answer("Prometheus' text format", "text/plain")),
)  # fmt: skip
async def metrics(request: Request, state: State) -> Response:
    state.require(request, Role.VIEWER)
    state.update_metrics()
    state.metrics.ready.set(_unready(state, may_control=False, known=set()) is None)
    for folder, free in (await asyncio.to_thread(_free_ratios, state.config.serve)).items():
        state.metrics.disk_free.labels(folder).set(free)
    sessions = {session.id for session in state.watchable(request)}
    return Response(state.metrics.text(sessions), media_type="text/plain; version=0.0.4; charset=utf-8")


def _free_ratios(serve: ServeConfig) -> dict[str, float]:
    """The free share of the disk of each folder that the server writes to, by setting. Blocking."""
    found = {}
    for name in ("jobs_dir", "state_dir", "handover"):
        if (folder := getattr(serve, name)) is not None:
            with contextlib.suppress(OSError):  # a network's disk that is gone has no figure
                usage = shutil.disk_usage(Path(folder).expanduser())
                found[name] = usage.free / usage.total
    return found


def _unready(state: AppState, may_control: bool, known: set[str]) -> Problem | None:
    """Why the server is not ready, to a caller who may watch the sessions `known`; None: it is."""
    manager = state.manager
    if manager.draining and manager.engine.state != "failed":
        return Problem(503, "The server is about to end.", code="draining")
    if not manager.engine.running:
        return state.engine_problem(may_control)
    session = manager.get(DEFAULT_SESSION)
    if session is not None and not session.opened:
        return state.engine_problem(may_control, session)
    if opening := [each.id for each in manager.opening if each.engine.state != "waiting"]:
        message = f"{len(opening)} sessions are not open yet."
        named = [id for id in opening if id in known]
        return Problem(503, message, {"Retry-After": "1"}, code="opening", sessions=named)
    if session is None:  # it was ended over the API; others may play
        return None
    if (stalled_s := session.stalled_s()) > STALLED_S:
        message = f"The engine has made no frame for {stalled_s:.1f} s."
        return Problem(503, message, {"Retry-After": "1"}, code="stalled")
    return None
