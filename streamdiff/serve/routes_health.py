"""Whether the server lives, whether it is ready, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from streamdiff.serve.access import Role
from streamdiff.serve.problem import Problem
from streamdiff.serve.services import services_of

STALLED_S = 2.0


def router() -> APIRouter:
    """`/healthz`, `/readyz` and `/metrics`."""
    routes = APIRouter()
    routes.add_api_route("/healthz", _healthz, methods=["GET"])
    routes.add_api_route("/readyz", _readyz, methods=["GET"])
    routes.add_api_route("/metrics", _metrics, methods=["GET"])
    return routes


async def _healthz() -> Response:
    return JSONResponse({"alive": True})


async def _readyz(request: Request) -> Response:
    services = services_of(request)
    view = services.running_view(request)
    if services.hub.draining:
        raise Problem(503, "The server is about to end.", code="draining")
    if view.engine == "restarting":
        message = f"The engine is being started again: {view.engine_reason}"
        raise Problem(503, message, {"Retry-After": str(services.restart_s())}, code="restarting")
    if not view.opened:
        raise Problem(503, "The stream is not open yet.", {"Retry-After": "1"})
    stalled_s = view.stalled_s()
    if stalled_s > STALLED_S:
        raise Problem(503, f"The engine has made no frame for {stalled_s:.1f} s.", {"Retry-After": "1"})
    return JSONResponse({"ready": True})


async def _metrics(request: Request) -> Response:
    services = services_of(request)
    services.require(request, Role.VIEWER)
    services.measure()
    return Response(services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
