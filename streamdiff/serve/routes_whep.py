"""WHEP over HTTP (draft-ietf-wish-whep): offers, candidates, the end of a viewer. Knows nothing about peer connections.

`POST /whep` watches the default session, `POST /whep/{session}` any; the viewer is then `/whep/{session}/{viewer}`.
"""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from streamdiff.config import IceServer
from streamdiff.serve.access import Role
from streamdiff.serve.problem import Problem, media_type, read_body
from streamdiff.serve.sdp import MAX_SDP_BYTES
from streamdiff.serve.services import Services, refusals, services_of

SDP_TYPE = "application/sdp"
TRICKLE_TYPE = "application/trickle-ice-sdpfrag"


def router() -> APIRouter:
    """The routes under `/whep`."""
    routes = APIRouter()
    for endpoint in ("/whep", "/whep/{session}"):
        routes.add_api_route(endpoint, _options, methods=["OPTIONS"], include_in_schema=False)
        routes.add_api_route(endpoint, _describe, methods=["GET", "HEAD"], include_in_schema=False)
        routes.add_api_route(endpoint, _post, methods=["POST"])
    viewer, other = "/whep/{session}/{id}", ["OPTIONS", "GET", "HEAD"]
    routes.add_api_route(viewer, _viewer_options, methods=other, include_in_schema=False)
    routes.add_api_route(viewer, _viewer_patch, methods=["PATCH"])
    routes.add_api_route(viewer, _viewer_delete, methods=["DELETE"])
    return routes


def links(servers: list[IceServer]) -> dict[str, str]:
    """The `Link` header that tells a viewer which STUN and TURN servers to use; nothing when there are none."""
    parts = []
    for server in servers:
        words = [f"<{server.url}>", 'rel="ice-server"']
        if server.username is not None and server.credential is not None:
            words += [f'username="{server.username}"', f'credential="{server.credential}"']
            words.append('credential-type="password"')
        parts.append("; ".join(words))
    return {"Link": ", ".join(parts)} if parts else {}


async def _options(request: Request) -> Response:
    services = services_of(request)
    headers = {"Accept-Post": SDP_TYPE, "Allow": "OPTIONS, GET, HEAD, POST"}
    # Everybody is answered, but a TURN server's credentials are for those who may watch.
    told = services.config.serve.ice_servers if services.role(request) is not Role.NOBODY else []
    return Response(status_code=200, headers=headers | links(told))


async def _describe() -> Response:
    return Response(status_code=200, headers={"Content-Type": SDP_TYPE, "Accept-Post": SDP_TYPE})


async def _post(request: Request) -> Response:
    services = services_of(request)
    with refusals(services.metrics.viewers_refused):
        return await _connect(services, request)


async def _connect(services: Services, request: Request) -> Response:
    if media_type(request) != SDP_TYPE:
        raise Problem(415, f"An offer is {SDP_TYPE}.", {"Accept-Post": SDP_TYPE})
    offer = _text(await read_body(request, MAX_SDP_BYTES))
    view = services.running_view(request)
    address = request.client.host if request.client else ""
    id, answer = await services.viewers.create(
        view, offer, address, request.query_params.get("codec"), services.may_control(request, view)
    )
    headers = {"Location": f"/whep/{quote(view.session, safe='')}/{id}"} | links(services.config.serve.ice_servers)
    return Response(answer, 201, headers, media_type=SDP_TYPE)


async def _viewer_options() -> Response:
    headers = {"Accept-Patch": TRICKLE_TYPE, "Allow": "OPTIONS, GET, HEAD, PATCH, DELETE"}
    return Response(status_code=200, headers=headers)


async def _viewer_patch(request: Request, session: str, id: str) -> Response:
    if media_type(request) != TRICKLE_TYPE:
        raise Problem(415, f"A fragment is {TRICKLE_TYPE}.", {"Accept-Patch": TRICKLE_TYPE})
    fragment = _text(await read_body(request, MAX_SDP_BYTES))
    await services_of(request).viewers.trickle(session, id, fragment)
    return Response(status_code=204)


async def _viewer_delete(request: Request, session: str, id: str) -> Response:
    await services_of(request).viewers.delete(session, id)
    return Response(status_code=200)


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, "The body is not UTF-8 text.") from error
