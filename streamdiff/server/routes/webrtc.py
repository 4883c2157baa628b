"""WHEP (draft-ietf-wish-whep) and WHIP (RFC 9725) over HTTP: offers, candidates, the end of a viewer or a sender. Knows
nothing about peer connections.

`POST /whep` watches the default session, `POST /whep/{session}` any; the viewer is then `/whep/{session}/{viewer}`.
`POST /whip` feeds a session with video, from OBS, GStreamer, FFmpeg or a page's camera, likewise: the sender is then
`/whip/{session}/{sender}`. It takes a control token of the session.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from streamdiff.config import IceServer
from streamdiff.server.app_state import AppState, count_refusals, watcher_of
from streamdiff.server.auth import Role
from streamdiff.server.peers import address_of
from streamdiff.server.problem import Problem, Unavailable
from streamdiff.server.routes.bodies import media_type, read_bytes
from streamdiff.server.routes.dependencies import SessionId, State, Steered, answer, body_of, operation
from streamdiff.server.sessions.manager import DEFAULT_SESSION
from streamdiff.server.webrtc.sdp import MAX_SDP_BYTES

SDP_TYPE = "application/sdp"
TRICKLE_TYPE = "application/trickle-ice-sdpfrag"
CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_OFFER, _FRAGMENT = ("An offer", SDP_TYPE, "Accept-Post"), ("A fragment", TRICKLE_TYPE, "Accept-Patch")
"""Kinds of bodies, for `_read_sdp`."""
_VIEWER, _SENDER = "/whep/{session}/{id}", "/whip/{session}/{id}"

_ViewerId = Annotated[str, Field(description="the viewer")]
_SenderId = Annotated[str, Field(description="the sender")]
_Codec = Annotated[str | None, Query(description="only this one", json_schema_extra={"enum": ["h264", "vp8"]})]
_ClientId = Annotated[
    str | None,
    Query(
        alias="client",
        description="the same whenever one program comes back: its dead connection makes room where all is taken",
        json_schema_extra={"pattern": f"^{CLIENT_ID.pattern}$"},
    ),
]
_Strength = Annotated[float | None, Query(gt=0, le=1, description="how much noise is mixed in, as `strength` says")]
_OnEnd = Annotated[
    Literal["text", "end"],
    Query(description="when the video ends: the session continues from its prompt alone, or ends too"),
]
_ACCEPTS = answer("Allow, and Accept-Post or Accept-Patch, say what is taken")
_ANSWERED = answer("The answer; Location: the viewer or sender, to PATCH and DELETE", SDP_TYPE, status=201)

watching = APIRouter(tags=["watching"], default_response_class=Response)
feeding = APIRouter(tags=["feeding"], default_response_class=Response)


# ---- watching -----------------------------------------------------------------------------------------------------


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
        offer = await _read_sdp(request, *_OFFER)
        live = state.running_session(request)
        if client_id is not None and not CLIENT_ID.fullmatch(client_id):
            why = f"`client` is {client_id[:40]!r}; it is 8 to 64 letters, digits, - or _."
            raise Problem(422, f"{why} Leave it out, or draw it once.", code="client", field="client")
        if why := state.manager.refuse_viewer(live):
            raise Unavailable("memory", why, state.manager.retry_after_s())
        may_control = state.may_control(request, live)
        id, answer = await state.viewers.create(live, offer, address_of(request), codec, may_control, client_id)
    return _answered(state, f"/whep/{quote(live.id, safe='')}/{id}", answer)


@watching.options(_VIEWER, summary="What is taken here", **operation(None, 404, 429, answers=_ACCEPTS))
@watching.get(_VIEWER, summary="What is taken here", **operation(None, 404, 429, answers=_ACCEPTS))
async def describe_viewer(request: Request, state: State, session: SessionId, id: _ViewerId) -> Response:
    state.viewers.find(session, id, address_of(request))
    headers = {"Accept-Patch": TRICKLE_TYPE, "Allow": "OPTIONS, GET, HEAD, PATCH, DELETE"}
    return Response(headers=headers)


@watching.patch(
    _VIEWER, status_code=204, summary="Add candidates (trickle ICE)",
    **operation(None, 404, 429, body=body_of(TRICKLE_TYPE)),
)  # fmt: skip
async def add_candidates(request: Request, state: State, session: SessionId, id: _ViewerId) -> None:
    await state.viewers.trickle(session, id, await _read_sdp(request, *_FRAGMENT), address_of(request))


@watching.delete(
    _VIEWER, summary="Stop watching",
    **operation(None, 404, 429, answers=answer("It watches no more")),
)  # fmt: skip
async def stop_watching(request: Request, state: State, session: SessionId, id: _ViewerId) -> Response:
    await state.viewers.delete(session, id, address_of(request))
    return Response()


# ---- feeding ------------------------------------------------------------------------------------------------------


async def feed(
    request: Request, state: State, live: Steered, strength: _Strength = None, on_end: _OnEnd = "text"
) -> Response:
    offer = await _read_sdp(request, *_OFFER)
    live.wheel.check_holder(watcher_of(request, live))
    id, answer = await state.feeders.create(live, offer, address_of(request), strength, on_end == "end")
    return _answered(state, f"/whip/{quote(live.id, safe='')}/{id}", answer)


async def describe_feeding() -> Response:
    return Response(headers={"Accept-Post": SDP_TYPE, "Allow": "OPTIONS, POST"})


@feeding.patch(
    _SENDER, status_code=204, summary="Add candidates (trickle ICE)",
    **operation("steer", 404, 410, 503, body=body_of(TRICKLE_TYPE)),
)  # fmt: skip
async def add_sender_candidates(request: Request, state: State, live: Steered, id: _SenderId) -> None:
    await state.feeders.trickle(live.id, id, await _read_sdp(request, *_FRAGMENT), address_of(request))


@feeding.delete(
    _SENDER, summary="Stop sending",
    **operation("steer", 404, 410, 503, answers=answer("It sends no more")),
)  # fmt: skip
async def stop_feeding(request: Request, state: State, live: Steered, id: _SenderId) -> Response:
    await state.feeders.delete(live.id, id, address_of(request))
    return Response()


for endpoint in ("/whep", "/whep/{session}"):
    watching.add_api_route(
        endpoint, options, methods=["OPTIONS"], summary="What is taken here, and STUN and TURN servers",
        **operation("watch", optional=True, answers=_ACCEPTS),
    )  # fmt: skip
    watching.add_api_route(
        endpoint, describe, methods=["GET"], summary="What is taken here",
        **operation(None, answers=answer("Accept-Post says what is taken", SDP_TYPE)),
    )  # fmt: skip
    watching.add_api_route(
        endpoint, watch, methods=["POST"], status_code=201, summary="Watch: an offer for an answer",
        **operation("watch", 404, 410, 429, 503, body=body_of(SDP_TYPE), answers=_ANSWERED),
    )  # fmt: skip
for endpoint in ("/whip", "/whip/{session}"):
    feeding.add_api_route(
        endpoint, feed, methods=["POST"], status_code=201, summary="Send video: an offer for an answer",
        **operation("steer", 404, 406, 409, 410, 503, 504, body=body_of(SDP_TYPE), answers=_ANSWERED),
    )  # fmt: skip
    feeding.add_api_route(
        endpoint, describe_feeding, methods=["OPTIONS"], summary="What is taken here",
        **operation(None, answers=_ACCEPTS),
    )  # fmt: skip


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


def _answered(state: AppState, location: str, answer: str) -> Response:
    """The response with the SDP answer to an offer, and where its connection is."""
    response = Response(answer, 201, {"Location": location}, media_type=SDP_TYPE)
    return with_links(response, state.ice_servers.issue())


async def _read_sdp(request: Request, name: str, kind: str, accept: str) -> str:
    """The SDP of a body of that `kind`, without a byte order mark; `accept` is the header that names it.

    Raises:
        Problem: 400, 413, 415.
    """
    if media_type(request) != kind:
        raise Problem(415, f"{name} is {kind}.", {accept: kind})
    try:
        return (await read_bytes(request, MAX_SDP_BYTES)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Problem(400, "The body is not UTF-8 text.") from error
