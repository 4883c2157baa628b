"""FastAPI dependencies of the routes, and what it does not derive for OpenAPI: needed tokens, bodies as bytes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from pydantic import Field

from streamdiff.server.app_state import AppState, state_of
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import DEFAULT_SESSION

Route = dict[str, Any]
"""Arguments of a route's decorator."""

_TOKEN = HTTPBearer(
    scheme_name="token",
    description=(
        "The server's view or control token, or one of the session's own. An operation that names `watch` takes any of "
        "them, one that names `steer` a control token. A server that was started without tokens asks for none, but to "
        "steer a session that was opened over this API; one with a control token alone lets everybody watch the "
        "default session. The WebSocket /api/sessions/{session}/control takes the token as this header too, or, since "
        "pages can set none, as the subprotocol `streamdiff.token.TOKEN`, offered beside `streamdiff`."
    ),
    auto_error=False,
)


SessionId = Annotated[str, Field(description="which session")]
"""A parameter of the path, or else, with a default, of the query."""


def _watchable_session(request: Request, session: SessionId = DEFAULT_SESSION) -> LiveSession:
    return state_of(request).session(request)


def _controllable_session(request: Request, session: SessionId = DEFAULT_SESSION) -> LiveSession:
    return state_of(request).controllable_session(request)


State = Annotated[AppState, Depends(state_of)]
Watched = Annotated[LiveSession, Depends(_watchable_session)]
"""The session of a request that may watch it, see `AppState.session`."""
Controlled = Annotated[LiveSession, Depends(_controllable_session)]
"""The session of a request that may change it, see `AppState.controllable_session`."""

BINARY = {"type": "string", "format": "binary"}
JSON = "application/json"


def needs(need: Literal["watch", "steer"], *, optional: bool = False, **extra: Any) -> Route:
    """An operation that takes a token good for `need`; `optional`: all are answered, who shows a token gets more.

    `extra` goes into the operation's description.
    """
    anybody: dict[str, Any] = {"security": [{}]} if optional else {}  # is added to the token: either will do
    return {"dependencies": [Security(_TOKEN, scopes=[need])], "openapi_extra": extra | anybody}


def open_to_all(**extra: Any) -> Route:
    """An operation that takes no token."""
    return {"openapi_extra": extra | {"security": []}}


def body(media_type: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """The body that an operation takes, for `needs`; without a `schema`, text."""
    content = {media_type: {"schema": schema or {"type": "string"}}}
    return {"requestBody": {"required": True, "content": content}}


def answer(says: str, media_type: str = "", schema: dict[str, Any] | None = None, status: int = 200) -> Any:
    """An answer that is no JSON, or has no body, for a route's `responses`."""
    content = {"content": {media_type: {"schema": schema or {"type": "string"}}}} if media_type else {}
    return {status: {"description": says, **content}}
