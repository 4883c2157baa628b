"""WHEP over HTTP: offers, candidates, the end of a viewer. Knows nothing about peer connections."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from streamdiff.serve.problem import Problem, media_type, read_body
from streamdiff.serve.sdp import MAX_SDP_BYTES
from streamdiff.serve.services import services_of

SDP_TYPE = "application/sdp"
TRICKLE_TYPE = "application/trickle-ice-sdpfrag"


def router() -> APIRouter:
    """The routes under `/whep`."""
    routes = APIRouter()
    routes.add_api_route("/whep", _whep_options, methods=["OPTIONS"])
    routes.add_api_route("/whep", _whep_describe, methods=["GET", "HEAD"])
    routes.add_api_route("/whep", _whep_post, methods=["POST"])
    routes.add_api_route("/whep/{id}", _viewer_options, methods=["OPTIONS", "GET", "HEAD"])
    routes.add_api_route("/whep/{id}", _viewer_patch, methods=["PATCH"])
    routes.add_api_route("/whep/{id}", _viewer_delete, methods=["DELETE"])
    return routes


async def _whep_options() -> Response:
    return Response(status_code=200, headers={"Accept-Post": SDP_TYPE, "Allow": "OPTIONS, GET, HEAD, POST"})


async def _whep_describe() -> Response:
    return Response(status_code=200, headers={"Content-Type": SDP_TYPE, "Accept-Post": SDP_TYPE})


async def _whep_post(request: Request) -> Response:
    services = services_of(request)
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
    await services_of(request).viewers.trickle(id, _text(await read_body(request, MAX_SDP_BYTES)))
    return Response(status_code=204)


async def _viewer_delete(request: Request, id: str) -> Response:
    await services_of(request).viewers.delete(id)
    return Response(status_code=200)


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, "The body is not UTF-8 text.") from error
