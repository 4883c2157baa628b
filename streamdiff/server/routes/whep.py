"""WHEP over HTTP (draft-ietf-wish-whep): offers, candidates, the end of a viewer. Knows nothing about peer connections.

`POST /whep` watches the default session, `POST /whep/{session}` any; the viewer is then `/whep/{session}/{viewer}`.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from streamdiff.config import IceServer
from streamdiff.server.app_state import AppState, count_refusals
from streamdiff.server.auth import Role
from streamdiff.server.peers import address_of
from streamdiff.server.problem import Problem, Responses, media_type, problem_responses, read_body
from streamdiff.server.routes.dependencies import SessionId, State, answer, body, needs, open_to_all
from streamdiff.server.sessions.manager import DEFAULT_SESSION
from streamdiff.server.webrtc.sdp import MAX_SDP_BYTES

SDP_TYPE = "application/sdp"
TRICKLE_TYPE = "application/trickle-ice-sdpfrag"
CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
OFFER, FRAGMENT = ("An offer", SDP_TYPE, "Accept-Post"), ("A fragment", TRICKLE_TYPE, "Accept-Patch")
"""Kinds of bodies, for `read_sdp`."""
ViewerId = Annotated[str, Field(description="the viewer")]

_Codec = Annotated[str | None, Query(description="only this one", json_schema_extra={"enum": ["h264", "vp8"]})]
_ClientId = Annotated[
    str | None,
    Query(
        alias="client",
        description="the same whenever one program comes back: its dead connection makes room where all is taken",
        json_schema_extra={"pattern": f"^{CLIENT_ID.pattern}$"},
    ),
]
_ANSWER: Responses = answer("The answer; Location: the viewer, to PATCH and DELETE", SDP_TYPE, status=201)
_ACCEPTS: Responses = answer("Allow, and Accept-Post or Accept-Patch, say what is taken")
_REFUSED = problem_responses(
    *(401, 404, 410, 413, 415, 429),
    s400="The offer is no SDP, or lacks what it must have",
    s422="The offer cannot be answered, or a parameter is wrong",
    s503="All places are taken, or the engine has ended; Retry-After: when to try again",
)
_NO_VIEWER = problem_responses(429, s404="No such viewer")
BAD_FRAGMENT = problem_responses(413, 415, s400="The fragment cannot be read", s422="An ICE restart")


router = APIRouter(tags=["watching"], default_response_class=Response)
_VIEWER = "/whep/{session}/{id}"


async def options(request: Request, state: State, session: SessionId = DEFAULT_SESSION) -> Response:
    headers = {"Accept-Post": SDP_TYPE, "Allow": "OPTIONS, GET, HEAD, POST"}
    # Everybody is answered, but a TURN server's credentials are for those who may watch.
    role = state.role(request, state.manager.get(session))
    response = with_links(Response(headers=headers), state.ice_servers.issue() if role is not Role.NOBODY else [])
    # Who may steer plays from here, over the connection that carries the controls.
    if (elsewhere := state.config.serve.whep_url) and session == DEFAULT_SESSION and role is Role.VIEWER:
        response.headers.append("Link", f'<{elsewhere}>; rel="alternate"')
    return response


async def describe(session: SessionId = DEFAULT_SESSION) -> Response:
    return Response(headers={"Content-Type": SDP_TYPE, "Accept-Post": SDP_TYPE})


async def watch(
    request: Request,
    state: State,
    session: SessionId = DEFAULT_SESSION,
    codec: _Codec = None,
    client_id: _ClientId = None,
) -> Response:
    with count_refusals(state.metrics.viewers_refused):
        offer = await read_sdp(request, *OFFER)
        live = state.running_session(request)
        _check_client_id(client_id)
        if why := state.manager.refuse_viewer(live):
            raise Problem(503, why, {"Retry-After": str(state.manager.retry_after_s())}, code="memory")
        may_control = state.may_control(request, live)
        id, answer = await state.viewers.create(live, offer, address_of(request), codec, may_control, client_id)
    return answered(state, f"/whep/{quote(live.id, safe='')}/{id}", answer)


for endpoint in ("/whep", "/whep/{session}"):
    router.add_api_route(
        endpoint, options, methods=["OPTIONS"], summary="What is taken here, and STUN and TURN servers",
        responses=_ACCEPTS | problem_responses(s401="Authorization is no `Bearer`"), **needs("watch", optional=True),
    )  # fmt: skip
    for method in ("GET", "HEAD"):
        router.add_api_route(
            endpoint, describe, methods=[method], summary="What is taken here",
            responses=answer("Accept-Post says what is taken", SDP_TYPE), **open_to_all(),
        )  # fmt: skip
    router.add_api_route(
        endpoint, watch, methods=["POST"], status_code=201, summary="Watch: an offer for an answer",
        responses=_ANSWER | _REFUSED, **needs("watch", **body(SDP_TYPE)),
    )  # fmt: skip


async def describe_viewer(request: Request, state: State, session: SessionId, id: ViewerId) -> Response:
    state.viewers.find(session, id, address_of(request))
    headers = {"Accept-Patch": TRICKLE_TYPE, "Allow": "OPTIONS, GET, HEAD, PATCH, DELETE"}
    return Response(headers=headers)


for method in ("OPTIONS", "GET", "HEAD"):
    router.add_api_route(
        _VIEWER, describe_viewer, methods=[method], summary="What is taken here", responses=_ACCEPTS | _NO_VIEWER,
        **open_to_all(),
    )  # fmt: skip


@router.patch(
    _VIEWER, status_code=204, summary="Add candidates (trickle ICE)", responses=_NO_VIEWER | BAD_FRAGMENT,
    **open_to_all(**body(TRICKLE_TYPE)),
)  # fmt: skip
async def add_candidates(request: Request, state: State, session: SessionId, id: ViewerId) -> Response:
    fragment = await read_sdp(request, *FRAGMENT)
    await state.viewers.trickle(session, id, fragment, address_of(request))
    return Response(status_code=204)


@router.delete(
    _VIEWER, summary="Stop watching", responses=answer("It watches no more") | _NO_VIEWER, **open_to_all()
)  # fmt: skip
async def stop_watching(request: Request, state: State, session: SessionId, id: ViewerId) -> Response:
    await state.viewers.delete(session, id, address_of(request))
    return Response()


def _check_client_id(client_id: str | None) -> None:
    """Raises Problem 422 unless `client_id` is None or matches `CLIENT_ID`."""
    if client_id is not None and not CLIENT_ID.fullmatch(client_id):
        message = (
            f"`client` is {client_id[:40]!r}; it is 8 to 64 letters, digits, - or _. Leave it out, or draw it once."
        )
        raise Problem(422, message, code="client", field="client")


def with_links(response: Response, servers: list[IceServer]) -> Response:
    """The response with a `Link` header for each STUN or TURN server to use: of several in one, OBS reads the first.
    Mutates: response."""
    for server in servers:
        words = [f"<{server.url}>", 'rel="ice-server"']
        if server.username is not None and server.credential is not None:
            words += [f'username="{server.username}"', f'credential="{server.credential}"']
            words.append('credential-type="password"')
        response.headers.append("Link", "; ".join(words))
    return response


def answered(state: AppState, location: str, answer: str) -> Response:
    """The response with the SDP answer to an offer, and where its connection is."""
    response = Response(answer, 201, {"Location": location}, media_type=SDP_TYPE)
    return with_links(response, state.ice_servers.issue())


async def read_sdp(request: Request, name: str, kind: str, accept: str) -> str:
    """The SDP of a body of that `kind`, without a byte order mark; `accept` is the header that names it.

    Raises:
        Problem: 400, 413, 415.
    """
    if media_type(request) != kind:
        raise Problem(415, f"{name} is {kind}.", {accept: kind})
    try:
        return (await read_body(request, MAX_SDP_BYTES)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Problem(400, "The body is not UTF-8 text.") from error
