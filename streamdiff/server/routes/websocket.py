"""The control WebSocket of a session."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Literal

from starlette.websockets import WebSocket, WebSocketDisconnect

from streamdiff.server.app_state import SOCKET_PROTOCOL, state_of
from streamdiff.server.metrics import Metrics
from streamdiff.server.peers import address_of
from streamdiff.server.problem import Problem, respond
from streamdiff.server.sessions.connection import MAX_BUFFERED_BYTES, ControlConnection
from streamdiff.server.sessions.live_session import LiveSession

SEND_LIMIT_S = 10.0
"""How long one message may take to leave."""
End = Literal["gone", "slow", "session_ended"]

_numbers = itertools.count(1)


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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
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
