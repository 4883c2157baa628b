"""WHIP over HTTP (RFC 9725): video for a session, from OBS, GStreamer, FFmpeg or a page's camera.

`POST /whip` feeds the default session, `POST /whip/{session}` any; the sender is then `/whip/{session}/{sender}`. It
takes a control token of the session. Knows nothing about peer connections.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from streamdiff.server.peers import address_of
from streamdiff.server.problem import Responses, problem_responses
from streamdiff.server.routes.dependencies import Controlled, State, answer, body, needs, open_to_all
from streamdiff.server.routes.whep import BAD_FRAGMENT, FRAGMENT, OFFER, SDP_TYPE, TRICKLE_TYPE, answered, read_sdp

SenderId = Annotated[str, Field(description="the sender")]
_Strength = Annotated[float | None, Query(gt=0, le=1, description="how much noise is mixed in, as `strength` says")]
_OnEnd = Annotated[
    Literal["text", "end"],
    Query(description="when the video ends: the session goes on from its prompt alone, or ends too"),
]
_ANSWER: Responses = answer("The answer; Location: the sender, to PATCH and DELETE", SDP_TYPE, status=201)
_REFUSED = problem_responses(
    *(401, 403, 404, 410, 413, 415, 429),
    s400="The offer is no SDP, or lacks what it must have",
    s406="The offer's media cannot be taken, or not all of it",
    s409="Somebody feeds the session already",
    s422="The offer cannot be answered, a parameter is wrong, or the model takes no video",
    s503="All places are taken, or the engine does not run; Retry-After: when to try again",
)
_NO_SENDER = problem_responses(401, 403, 404, 410, 429, 503)
_SENDER = "/whip/{session}/{id}"

router = APIRouter(tags=["feeding"], default_response_class=Response)


async def feed(
    request: Request, state: State, live: Controlled, strength: _Strength = None, on_end: _OnEnd = "text"
) -> Response:
    offer = await read_sdp(request, *OFFER)
    id, answer = await state.feeders.create(live, offer, address_of(request), strength, on_end == "end")
    return answered(state, f"/whip/{quote(live.id, safe='')}/{id}", answer)


async def describe() -> Response:
    return Response(headers={"Accept-Post": SDP_TYPE, "Allow": "OPTIONS, POST"})


for endpoint in ("/whip", "/whip/{session}"):
    router.add_api_route(
        endpoint, feed, methods=["POST"], status_code=201, summary="Send video: an offer for an answer",
        responses=_ANSWER | _REFUSED, **needs("steer", **body(SDP_TYPE)),
    )  # fmt: skip
    router.add_api_route(
        endpoint, describe, methods=["OPTIONS"], summary="What is taken here",
        responses=answer("Accept-Post says what is taken"), **open_to_all(),
    )  # fmt: skip


@router.patch(
    _SENDER, status_code=204, summary="Add candidates (trickle ICE)", responses=_NO_SENDER | BAD_FRAGMENT,
    **needs("steer", **body(TRICKLE_TYPE)),
)  # fmt: skip
async def add_candidates(request: Request, state: State, live: Controlled, id: SenderId) -> Response:
    await state.feeders.trickle(live.id, id, await read_sdp(request, *FRAGMENT), address_of(request))
    return Response(status_code=204)


@router.delete(_SENDER, summary="Stop sending", responses=answer("It sends no more") | _NO_SENDER, **needs("steer"))
async def stop_feeding(request: Request, state: State, live: Controlled, id: SenderId) -> Response:
    await state.feeders.delete(live.id, id, address_of(request))
    return Response()
