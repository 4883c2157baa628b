"""`/api/sessions/{id}/snapshot`: a session as one file, and what such a file says where a session is opened with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from streamdiff.engine.messages import Data
from streamdiff.errors import ConfigError, EngineFailure, RequestError
from streamdiff.server.app_state import AppState
from streamdiff.server.problem import Problem
from streamdiff.server.routes.bodies import FORM, MAX_FORM_BYTES, media_type
from streamdiff.server.routes.dependencies import BINARY, Controlled, State, answer, operation, problems
from streamdiff.server.routes.schemas import NewSession
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.receipts import SessionEnded
from streamdiff.snapshot_header import SavedSession, check_signature, read_saved_session, signed

OCTETS = "application/octet-stream"
SAVE_TIMEOUT_S = 60.0
SEND_LIMIT_S = 10.0
"""A download that reads nothing for so many seconds is aborted, as others wait for its slot."""
_PIECE = 1 << 18
Headers = dict[str, str]
_FIXED = ("seed", "kv_context", "image")
"""What a snapshot has, and a session that goes on from it cannot begin with."""
logger = logging.getLogger(__name__)
router = APIRouter(prefix="/api/sessions", tags=["sessions"], responses=problems(404, 409, 410, 503, 504))


@router.get(
    "/{session}/snapshot", summary="The session as one file, from which another goes on",
    response_class=Response,
    **operation("steer", answers=answer("A safetensors file; Content-Length: its bytes", OCTETS, BINARY)),
)  # fmt: skip
async def save_session(state: State, live: Controlled) -> Response:
    _refuse_if_busy(state)
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(state.snapshots)
        header, rest = signed(await _taken(state, live), state.snapshot_key)
        sending = held.pop_all()

    async def pieces() -> AsyncIterator[bytes | memoryview]:
        yield header
        for begin in range(0, len(rest), _PIECE):
            yield rest[begin : begin + _PIECE]

    return _Sending(pieces(), sending, _headers(live, len(header) + len(rest)))


@router.head(
    "/{session}/snapshot", summary="How large the session's file would be now",
    response_class=Response, **operation("steer", answers=answer("Content-Length: its bytes")),
)  # fmt: skip
async def size_of_snapshot(state: State, live: Controlled) -> Response:
    _refuse_if_busy(state)
    async with state.snapshots:
        header, rest = signed(await _taken(state, live), state.snapshot_key)
        return Response(headers=_headers(live, len(header) + len(rest)), media_type=OCTETS)


@contextlib.asynccontextmanager
async def place_for_upload(request: Request, state: AppState) -> AsyncIterator[None]:
    """While the form of a request is read and used that may hold a snapshot, which lies in memory: as many at a time as
    are taken or sent. Raises Problem, 503, where there are more."""
    length = request.headers.get("content-length", "")
    small = length.isdigit() and int(length) <= MAX_FORM_BYTES
    async with contextlib.AsyncExitStack() as held:
        if media_type(request) == FORM and not small:
            _refuse_if_busy(state)
            await held.enter_async_context(state.snapshots)
        yield


def _refuse_if_busy(state: AppState) -> None:
    """Raises Problem, 503, while MAX_SNAPSHOTS are taken or sent."""
    if state.snapshots.locked():
        raise Problem(503, "Other snapshots are being sent; ask again.", {"Retry-After": "1"}, code="busy")


def _headers(live: LiveSession, size: int) -> Headers:
    return {
        "Content-Length": str(size),
        "Content-Disposition": f'attachment; filename="{live.id}.safetensors"',
        "Cache-Control": "no-store",
    }


async def _taken(state: AppState, live: LiveSession) -> Data:
    """A session's file. Raises Problem: 409, 410, 503, 504."""
    if not live.opened:
        raise state.engine_problem(may_control=True, session=live)
    try:
        return await live.snapshots.save(SAVE_TIMEOUT_S)
    except RequestError as error:
        raise Problem(409, str(error), code="refused", field=error.field) from error
    except EngineFailure as error:
        raise state.engine_problem(may_control=True, session=live) from error
    except SessionEnded as error:
        raise Problem(410, "The session has ended.", code="ended") from error
    except TimeoutError as error:
        raise Problem(504, "The engine saved nothing in time.", code="timeout") from error


class _Sending(StreamingResponse):
    """Gives back its place when it is sent, or the caller has gone or takes nothing."""

    def __init__(
        self, content: AsyncIterator[bytes | memoryview], place: contextlib.AsyncExitStack, headers: Headers
    ) -> None:
        super().__init__(content, headers=headers, media_type=OCTETS)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def within_limit(message: Message) -> None:
            async with asyncio.timeout(SEND_LIMIT_S):
                await send(message)

        async with self._place:
            try:
                await super().__call__(scope, receive, within_limit)
            except TimeoutError:  # the connection is closed, as the response is not complete
                logger.info("A snapshot was given up: nothing of it was taken for %g s.", SEND_LIMIT_S)


def given_snapshot(data: Data, wanted: NewSession, key: bytes | None) -> SavedSession:
    """The session in a file that was sent, signed with `key` (None: trusted without). Reads all of it: on a thread.

    Raises:
        Problem: 422 for what is no snapshot, or has no signature or another one, or a field that such a session cannot
            have.
    """
    for name in _FIXED:
        if name in wanted.model_fields_set and getattr(wanted, name) is not None:
            raise Problem(
                422, f"`{name}`: a session that goes on from a snapshot has that of the snapshot; leave it out.",
                code="invalid", field=name,
            )  # fmt: skip
    try:
        saved = read_saved_session(data)
        if key is not None:
            check_signature(data, key)
        return saved
    except ConfigError as error:
        raise Problem(422, f"`snapshot`: {error}", code=error.code or "refused", field="snapshot") from error
