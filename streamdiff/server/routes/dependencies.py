"""FastAPI dependencies of the routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from pydantic import Field

from streamdiff.server.app_state import AppState, state_of
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import DEFAULT_SESSION

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
