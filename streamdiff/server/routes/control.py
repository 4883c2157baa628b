"""State and control of one session, over HTTP and a WebSocket, and the frame on show as a JPEG; liveness, readiness and
metrics of the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from starlette.websockets import WebSocket, WebSocketDisconnect

from streamdiff.config import ServeConfig
from streamdiff.server.app_state import SOCKET_PROTOCOL, AppState, state_of, watcher_of
from streamdiff.server.auth import Role
from streamdiff.server.metrics import Metrics
from streamdiff.server.peers import address_of
from streamdiff.server.problem import Problem, Unavailable, respond
from streamdiff.server.routes.bodies import JSON, media_type, read_bytes, read_json
from streamdiff.server.routes.dependencies import BINARY, State, Steered, Watched, answer, body_of, operation
from streamdiff.server.routes.schemas import Answer, read
from streamdiff.server.sessions import control as messages
from streamdiff.server.sessions.connection import MAX_BUFFERED_BYTES, ControlConnection
from streamdiff.server.sessions.control import MAX_BODY_BYTES, ControlMessage, Receipt, WheelMessage
from streamdiff.server.sessions.live_session import STALLED_S, LiveSession
from streamdiff.server.sessions.manager import DEFAULT_SESSION
from streamdiff.server.sessions.wheel import Watcher
from streamdiff.server.tasks import end_tasks, wait_at_most

ANSWER_TIMEOUT_S = 5.0
"""How long a request waits for the engine's answer before it is answered with 202."""
STAGGER_S = 0.0004
"""Seconds for each reader of events, over which they are written: twice what it takes."""
QUIET_S = 15.0
"""After so long without an event a comment goes out, so that proxies keep the connection."""
SEND_LIMIT_S = 10.0
"""How long one message may take to leave."""
End = Literal["gone", "slow", "session_ended"]
_LATER = answer("The engine has it and carries it out later (receipt `asked`)", status=202)
_numbers = itertools.count(1)
router, probes = APIRouter(tags=["control"]), APIRouter(tags=["health"])


@router.get("/api/sessions/{session}/events", include_in_schema=False)  # as the WebSocket: it does not end
async def events(live: Watched) -> Response:
    """What the control channel tells, to read only, as server-sent events: `hello` with the state, then each new
    `state`, `session_ended` or `engine_ended`; no figures and no receipts."""
    return StreamingResponse(_events(live), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(session: LiveSession) -> AsyncIterator[str]:
    """Server-sent events. Of a kind that comes faster than it is read the newest is sent."""
    name, newest, came = f"sse-{next(_numbers)}", dict[str, dict[str, Any]](), asyncio.Event()

    def take(message: dict[str, Any]) -> None:
        newest[message["type"]] = message
        came.set()

    session.join(name, take, may_control=False)
    try:
        while True:
            await wait_at_most(came, QUIET_S)
            came.clear()
            # What thousands read is not written in one go, for which the video would have to wait.
            await asyncio.sleep(random.random() * STAGGER_S * len(session.peers))
            sent = "".join(f"data: {json.dumps(message, ensure_ascii=False)}\n\n" for message in newest.values())
            ended = "session_ended" in newest
            newest.clear()
            yield sent or ": quiet\n\n"
            if ended:
                return
    finally:
        session.leave(name)


@router.get("/api/state", summary="Everything that a page needs to draw itself", **operation("watch", 404, 410))
async def show_state(request: Request, state: State, live: Watched) -> Response:
    manager, may_control = state.manager, state.may_control(request, live)
    engine = manager.engine
    reason = None if engine.running else engine.reason_for(may_control)
    return JSONResponse(
        {
            "engine": {"running": engine.running, "reason": reason, **asdict(manager.ready)},
            "state": live.state(may_control),
            "stats": live.stats(),
            "occupancy": list(manager.load.occupancy),
            "batching": manager.load.batching,
            "viewers": state.viewers.count,
            "max_viewers": state.config.serve.max_viewers,
            "outputs": [asdict(output.status) for output in state.outputs.configured],
            "codecs_offered": list(state.codecs),
        }
    )


@router.post(
    "/api/control", summary="Say one control message",
    **operation("steer", 404, 409, 410, 503, 504, body=body_of(JSON, messages.message_schema()), answers=_LATER),
)  # fmt: skip
async def control(request: Request, state: State, live: Steered) -> Response:
    if media_type(request) != JSON:
        raise Problem(415, "A control message is application/json.")
    message = messages.parse(await read_bytes(request, MAX_BODY_BYTES))
    if message.type == "get":
        return JSONResponse(live.state(state.may_control(request, live)))
    if message.type == "wheel":
        return JSONResponse(await at_wheel(request, state, live, message))
    live.wheel.check(message, watcher_of(request, live))
    receipt = await carry_out(live, message)
    return JSONResponse(receipt.message(), status_of([receipt]))


@router.get(
    "/frame.jpg", summary="The frame on show", response_class=Response,
    **operation("watch", 404, 410, 503, answers=answer("A JPEG file", "image/jpeg", BINARY)),
)  # fmt: skip
async def frame(live: Watched) -> Response:
    jpeg = await live.playback.jpeg()
    if jpeg is None:
        raise Unavailable("opening", "No frame has been made yet.", 1)
    return Response(jpeg, media_type="image/jpeg")


# ---- the wheel ----------------------------------------------------------------------------------------------------


@router.get("/api/sessions/{session}/wheel", summary="Who has the wheel, who waits", **operation("watch", 404, 410))
async def show_wheel(request: Request, state: State, live: Watched) -> dict[str, Any]:
    """With the header Wheel-Token, the caller's place too, which is kept by asking where there is no connection."""
    return _wheel_of(request, state, live, watcher_of(request, live))


@router.post(
    "/api/sessions/{session}/wheel", summary="Take the wheel or wait for it, give it up, or manage it",
    **operation("watch", 403, 404, 409, 410, 429, 503, body=body_of(JSON, WheelMessage.model_json_schema())),
)  # fmt: skip
async def change_wheel(request: Request, state: State, live: Watched) -> dict[str, Any]:
    state.limit(request)
    return await at_wheel(request, state, live, read(WheelMessage, await read_json(request, MAX_BODY_BYTES)))


async def at_wheel(request: Request, state: AppState, live: LiveSession, message: WheelMessage) -> dict[str, Any]:
    """Carry out a message about the wheel; what is answered. Raises ControlError, see `Wheel.carry_out`."""
    watcher = watcher_of(request, live) or live.wheel.new(state.may_control(request, live), "", address_of(request))
    about = live.wheel.carry_out(message, watcher, state.owns(request, live))
    if message.do == "remove":
        await state.remove(live, about.peer)
    return _wheel_of(request, state, live, watcher)


def _wheel_of(request: Request, state: AppState, live: LiveSession, watcher: Watcher | None) -> dict[str, Any]:
    """The wheel, the caller's place, and for the session's owner who is connected."""
    told = live.wheel.state()
    if watcher is not None:
        told |= {"you": watcher.id, "place": live.wheel.place(watcher), "wheel_token": watcher.token}
    return told | ({"watchers": live.wheel.watchers()} if state.owns(request, live) else {})


# ---- requests -----------------------------------------------------------------------------------------------------


def status_of(receipts: list[Receipt]) -> int:
    """200 when all was accepted, 202 while some is still to come."""
    return 202 if any(receipt.stage == "asked" for receipt in receipts) else 200


async def carry_out(session: LiveSession, message: ControlMessage) -> Receipt:
    """Carry out a message; see `LiveSession.control_and_wait`."""
    return await session.control_and_wait(message, f"http-{next(_numbers)}", ANSWER_TIMEOUT_S)


# ---- the WebSocket ------------------------------------------------------------------------------------------------


@router.websocket("/api/sessions/{session}/control")
async def control_socket(socket: WebSocket) -> None:
    """Serve the control WebSocket of a session. It is refused with a problem document before it is accepted."""
    state = state_of(socket)
    address = address_of(socket)
    try:
        if (refusal := state.sockets.refusal(address)) is not None:
            raise refusal
        session = state.running_session(socket)
        may_control = state.may_control(socket, session)
    except Problem as problem:
        state.metrics.sockets_refused.labels(problem.code).inc()
        await socket.send_denial_response(respond(problem))
        return
    state.sockets.take(address)
    try:
        offered = socket.scope["subprotocols"]
        await socket.accept(SOCKET_PROTOCOL if SOCKET_PROTOCOL in offered else None)
        end = await WebSocketConnection(socket, session, state.metrics, may_control).run()
        if end == "session_ended":
            await socket.close(1000, "the session has ended")
    finally:
        state.sockets.release(address)


class WebSocketConnection(ControlConnection):
    """Control messages over an accepted WebSocket. A peer that does not read is disconnected after a bound."""

    def __init__(self, socket: WebSocket, session: LiveSession, metrics: Metrics, may_control: bool) -> None:
        self._socket = socket
        self._outbox: asyncio.Queue[str] = asyncio.Queue()
        self._outbox_bytes = 0
        self._overflow: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._ended = False
        super().__init__(f"ws-{next(_numbers)}", session, metrics, may_control)

    async def run(self) -> End:
        """Receive and send until one side ends; says why."""
        tasks = (self._overflow, asyncio.create_task(self._write()), asyncio.create_task(self._read()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            end = next(task for task in tasks if task.done()).result()
        finally:
            self.close()
            await end_tasks(*tasks)
        self._metrics.sockets_ended.labels(end).inc()
        return end

    def send(self, message: dict[str, Any]) -> None:
        super().send(message)
        self._ended = self._ended or message["type"] == "session_ended"

    def send_text(self, text: str) -> None:
        self._outbox.put_nowait(text)
        self._outbox_bytes += len(text)
        if self._outbox_bytes > MAX_BUFFERED_BYTES and not self._overflow.done():
            self._overflow.set_result("slow")

    async def _read(self) -> End:
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            text = message.get("text")
            self.on_message(message["bytes"] if text is None else text)
        return "gone"

    async def _write(self) -> End:
        while not (self._ended and self._outbox.empty()):
            text = await self._outbox.get()
            try:
                async with asyncio.timeout(SEND_LIMIT_S):
                    await self._socket.send_text(text)
            except TimeoutError:
                return "slow"
            except (WebSocketDisconnect, RuntimeError):
                return "gone"
            self._outbox_bytes -= len(text)
        return "session_ended"


# ---- liveness, readiness, metrics ----------------------------------------------------------------------------------


class Health(Answer):
    """The web process lives."""

    alive: Literal[True] = True


class Readiness(Answer):
    """The engine makes video."""

    ready: Literal[True] = True
    waiting: list[str] = Field([])
    """sessions that are opened when there is memory, of those whose token is shown; they were open before a restart
    of the engine or the server"""


@probes.get("/healthz", summary="Whether the web process lives", **operation(None))
async def healthz() -> Health:
    return Health()


@probes.get(
    "/health", summary="The same as /readyz, as vLLM calls it", **operation("steer", 503, optional=True)
)  # fmt: skip
@probes.get("/readyz", summary="Whether viewers can be sent here", **operation("steer", 503, optional=True))
async def readyz(request: Request, state: State) -> Readiness:
    """Answered without a token too, as probes have none. With a token that may watch it says what is wrong, with one
    that may steer in the engine's own words."""
    role = state.role(request)
    known = {session.id for session in state.watchable(request)}
    problem = _unready(state, role is Role.CONTROLLER, known)
    if problem is None:
        return Readiness(waiting=[session.id for session in state.manager.waiting if session.id in known])
    if role is Role.NOBODY:
        raise Problem(problem.status, "The server is not ready.", problem.headers)
    raise problem


@probes.get(
    "/metrics", summary="Figures for Prometheus", response_class=Response,
    **operation("watch", answers=answer("Prometheus' text format", "text/plain")),
)  # fmt: skip
async def metrics(request: Request, state: State) -> Response:
    state.require(request, Role.VIEWER)
    state.update_metrics()
    state.metrics.ready.set(_unready(state, may_control=False, known=set()) is None)
    for folder, free in (await asyncio.to_thread(_free_ratios, state.config.serve)).items():
        state.metrics.disk_free.labels(folder).set(free)
    sessions = {session.id for session in state.watchable(request)}
    return Response(state.metrics.text(sessions), media_type="text/plain; version=0.0.4; charset=utf-8")


def _free_ratios(serve: ServeConfig) -> dict[str, float]:
    """The free share of the disk of each folder that the server writes to, by setting. Blocking."""
    found = {}
    for name in ("jobs_dir", "state_dir", "handover"):
        if (folder := getattr(serve, name)) is not None:
            with contextlib.suppress(OSError):  # a network's disk that is gone has no figure
                usage = shutil.disk_usage(Path(folder).expanduser())
                found[name] = usage.free / usage.total
    return found


def _unready(state: AppState, may_control: bool, known: set[str]) -> Problem | None:
    """Why the server is not ready, to a caller who may watch the sessions `known`; None: it is."""
    manager = state.manager
    if manager.draining and manager.engine.state != "failed":
        return Problem(503, "The server is about to end.", code="draining")
    if not manager.engine.running:
        return state.engine_problem(may_control)
    session = manager.get(DEFAULT_SESSION)
    if session is not None and not session.opened:
        return state.engine_problem(may_control, session)
    waiting = {each.id for each in manager.waiting}
    if opening := [id for id in manager.reopening if id not in waiting]:
        message = f"{len(opening)} sessions are not open yet."
        named = [id for id in opening if id in known]
        return Unavailable("opening", message, 1, sessions=named)
    if session is None:  # it was ended over the API; others may play
        return None
    if (stalled_s := session.stalled_s()) > STALLED_S:
        return Unavailable("stalled", f"The engine has made no frame for {stalled_s:.1f} s.", 1)
    return None
