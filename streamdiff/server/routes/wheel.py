"""`/api/sessions/{session}/wheel`: who steers a session that many watch."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from streamdiff.server.app_state import AppState, watcher_of
from streamdiff.server.peers import address_of
from streamdiff.server.routes import schemas
from streamdiff.server.routes.bodies import JSON, read_json
from streamdiff.server.routes.dependencies import State, Watched, body_of, operation
from streamdiff.server.sessions.control import MAX_BODY_BYTES, WheelMessage
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.wheel import Watcher

router = APIRouter(prefix="/api/sessions/{session}/wheel", tags=["wheel"])


class PublicWatcher(schemas.Answer):
    """Who has the wheel, waits for it, or watches."""

    id: int
    name: str
    """as they chose it: escape it"""


class WheelInfo(schemas.Answer):
    """The wheel of a session."""

    holder: PublicWatcher | None
    """who steers alone; null: all steer who may"""
    queue: list[PublicWatcher]
    """who waits, the next one first"""
    open: bool
    """whether who may only watch may take it too"""
    you: int | None = None
    """the caller's number"""
    place: int | None = None
    """the caller's: 0 has the wheel, 1 is next; null: does not wait"""
    token: str | None = Field(None, description="the caller's, to show as header Wheel-Token")
    watchers: list[PublicWatcher] | None = None
    """connected ones, for the session's owner"""


@router.get("", summary="Who has the wheel, and who waits for it", **operation("watch", 404, 410))
async def show_wheel(request: Request, state: State, live: Watched) -> WheelInfo:
    """With the header Wheel-Token, the caller's place too, which without a connection is kept by asking."""
    return _info_of(request, state, live, watcher_of(request, live))


@router.post(
    "", summary="Take the wheel or wait for it, give it up, or rule it",
    **operation("watch", 403, 404, 409, 410, 429, 503, body=body_of(JSON, WheelMessage.model_json_schema())),
)  # fmt: skip
async def change_wheel(request: Request, state: State, live: Watched) -> WheelInfo:
    state.limit(request)
    message = schemas.read(WheelMessage, await read_json(request, MAX_BODY_BYTES))
    return await at_wheel(request, state, live, message)


async def at_wheel(request: Request, state: AppState, live: LiveSession, message: WheelMessage) -> WheelInfo:
    """Carry out a message about the wheel. Raises ControlError, see `Wheel.carry_out`."""
    known = watcher_of(request, live)
    watcher = known or live.wheel.new(state.may_control(request, live), address=address_of(request))
    about = live.wheel.carry_out(message, watcher, state.owns(request, live))
    if message.do == "remove":
        await state.remove(live, about.peer)
    return _info_of(request, state, live, watcher if known or live.wheel.place(watcher) is not None else None)


def _info_of(request: Request, state: AppState, live: LiveSession, watcher: Watcher | None) -> WheelInfo:
    known: dict[str, Any] = live.wheel.state()
    if watcher is not None:
        known |= {"you": watcher.id, "place": live.wheel.place(watcher), "token": watcher.token}
    if state.owns(request, live):
        known["watchers"] = live.wheel.connected()
    return WheelInfo.model_validate(known)
