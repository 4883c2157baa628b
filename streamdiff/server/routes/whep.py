"""WHEP over HTTP (draft-ietf-wish-whep): offers, candidates, the end of a viewer. Knows nothing about peer connections.

`POST /whep` watches the default session, `POST /whep/{session}` any; the viewer is then `/whep/{session}/{viewer}`.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from streamdiff.config import IceServer
from streamdiff.server.app_state import AppState, refusals, services_of
from streamdiff.server.auth import Role
from streamdiff.server.peers import address_of
from streamdiff.server.problem import Problem, Responses, described, media_type, read_body
from streamdiff.server.routes.openapi import answer, body, needs, open_to_all
from streamdiff.server.sessions.manager import DEFAULT_SESSION
from streamdiff.server.webrtc.sdp import MAX_SDP_BYTES

SDP_TYPE = "application/sdp"
TRICKLE_TYPE = "application/trickle-ice-sdpfrag"
CLIENT = re.compile(r"[A-Za-z0-9_-]{8,64}")

_TEXT = {"type": "string"}
_SESSION: list[dict[str, Any]] = [
    {"name": "session", "in": "path", "required": True, "schema": _TEXT, "description": "which to watch"},
]
_VIEWER = [*_SESSION, {"name": "id", "in": "path", "required": True, "schema": _TEXT, "description": "the viewer"}]
_SESSION_QUERY: list[dict[str, Any]] = [
    {"name": "session", "in": "query", "schema": _TEXT, "description": "which to watch; left out: the default one"},
]
_PARAMETERS: list[dict[str, Any]] = [
    {"name": "codec", "in": "query", "schema": {"enum": ["h264", "vp8"]}, "description": "only this one"},
    {
        "name": "client",
        "in": "query",
        "schema": {"type": "string", "pattern": f"^{CLIENT.pattern}$"},
        "description": "the same whenever one program comes back: its dead connection makes room where all is taken",
    },
]
_ANSWER: Responses = answer("The answer; Location: the viewer, to PATCH and DELETE", SDP_TYPE, status=201)
_TAKEN: Responses = answer("Allow, and Accept-Post or Accept-Patch, say what is taken")
_TAKEN_SDP: Responses = answer("Accept-Post says what is taken", SDP_TYPE)
_WRONG_TOKEN = described(s401="Authorization is no `Bearer`")
_REFUSED = described(
    s400="The offer is no SDP, or lacks what it must have",
    s401="This takes a token",
    s404="No such session",
    s410="The session has ended",
    s413="The offer is too large",
    s415="The body is no application/sdp",
    s422="The offer cannot be answered, or a parameter is wrong",
    s429="Too many connections from one address; Retry-After: when to try again",
    s503="All places are taken, or the engine has ended; Retry-After: when to try again",
)
_NO_VIEWER = described(s404="No such viewer", s429="Too many changes from one address")
_BAD_FRAGMENT = described(
    s400="The fragment cannot be read", s413="It is too large", s415="Another type", s422="An ICE restart"
)


def router() -> APIRouter:
    """The routes under `/whep`."""
    routes = APIRouter(tags=["watching"])
    for endpoint in ("/whep", "/whep/{session}"):
        which = {"parameters": _SESSION if "{" in endpoint else _SESSION_QUERY}
        routes.add_api_route(
            endpoint, _options, methods=["OPTIONS"], summary="What is taken here, and STUN and TURN servers",
            response_class=Response, responses=_TAKEN | _WRONG_TOKEN, **needs("watch", optional=True, **which),
        )  # fmt: skip
        for method in ("GET", "HEAD"):
            routes.add_api_route(
                endpoint, _describe, methods=[method], summary="What is taken here", response_class=Response,
                responses=_TAKEN_SDP, **open_to_all(**which),
            )  # fmt: skip
        extra = body(SDP_TYPE, _TEXT) | {"parameters": which["parameters"] + _PARAMETERS}
        routes.add_api_route(
            endpoint, _post, methods=["POST"], status_code=201, summary="Watch: an offer for an answer",
            response_class=Response, responses=_ANSWER | _REFUSED, **needs("watch", **extra),
        )  # fmt: skip
    viewer = "/whep/{session}/{id}"
    for method in ("OPTIONS", "GET", "HEAD"):
        routes.add_api_route(
            viewer, _viewer_options, methods=[method], summary="What is taken here", response_class=Response,
            responses=_TAKEN, **open_to_all(parameters=_VIEWER),
        )  # fmt: skip
    routes.add_api_route(
        viewer, _viewer_patch, methods=["PATCH"], status_code=204, summary="Add candidates (trickle ICE)",
        responses=_NO_VIEWER | _BAD_FRAGMENT, **open_to_all(**body(TRICKLE_TYPE, _TEXT)),
    )  # fmt: skip
    routes.add_api_route(
        viewer, _viewer_delete, methods=["DELETE"], summary="Stop watching", response_class=Response,
        responses=answer("It watches no more") | _NO_VIEWER, **open_to_all(),
    )  # fmt: skip
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
    view = services.hub.view(request.path_params.get("session", DEFAULT_SESSION))
    told = services.config.serve.ice_servers if services.role(request, view) is not Role.NOBODY else []
    return Response(status_code=200, headers=headers | links(told))


async def _describe() -> Response:
    return Response(status_code=200, headers={"Content-Type": SDP_TYPE, "Accept-Post": SDP_TYPE})


async def _post(request: Request) -> Response:
    services = services_of(request)
    with refusals(services.metrics.viewers_refused):
        return await _connect(services, request)


async def _connect(services: AppState, request: Request) -> Response:
    if media_type(request) != SDP_TYPE:
        raise Problem(415, f"An offer is {SDP_TYPE}.", {"Accept-Post": SDP_TYPE})
    offer = _text(await read_body(request, MAX_SDP_BYTES))
    view = services.running_view(request)
    id, answer = await services.viewers.create(
        view,
        offer,
        address_of(request),
        request.query_params.get("codec"),
        services.may_control(request, view),
        _client(request),
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
    await services_of(request).viewers.trickle(session, id, fragment, address_of(request))
    return Response(status_code=204)


async def _viewer_delete(request: Request, session: str, id: str) -> Response:
    await services_of(request).viewers.delete(session, id, address_of(request))
    return Response(status_code=200)


def _client(request: Request) -> str | None:
    """What the viewer's program calls itself, if anything."""
    client = request.query_params.get("client")
    if client is not None and not CLIENT.fullmatch(client):
        message = f"`client` is {client[:40]!r}; it is 8 to 64 letters, digits, - or _. Leave it out, or draw it once."
        raise Problem(422, message, code="client", field="client")
    return client


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, "The body is not UTF-8 text.") from error
