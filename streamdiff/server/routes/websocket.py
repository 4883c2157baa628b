"""A control WebSocket. Knows nothing about tokens, sessions' names or the engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any, Literal

from starlette.websockets import WebSocket, WebSocketDisconnect

from streamdiff.server.metrics import Metrics
from streamdiff.server.sessions.connection import ControlConnection
from streamdiff.server.sessions.live_session import LiveSession

MAX_BUFFERED_BYTES = 256 * 1024
SEND_LIMIT_S = 10.0
"""How long one message may take to leave."""
End = Literal["gone", "slow", "session_ended"]

_numbers = itertools.count(1)


class ControlSocket:
    """A conversation over an accepted WebSocket. A peer that does not read is let go after a bound."""

    def __init__(self, socket: WebSocket, view: LiveSession, metrics: Metrics, may_control: bool) -> None:
        self._socket = socket
        self._metrics = metrics
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._waiting_bytes = 0
        self._slow, self._ended = asyncio.Event(), False
        self._name = f"ws-{next(_numbers)}"
        self._conversation = ControlConnection(self._name, view, metrics, self._put, lambda: "unknown", may_control)

    async def run(self) -> End:
        """Speak until one side ends; says why."""
        parts = (self._read(), self._write(), self._slow.wait())
        tasks = [asyncio.create_task(part, name=self._name) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._conversation.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        end: End = "slow" if self._slow.is_set() else "session_ended" if self._ended else "gone"
        self._metrics.sockets_ended.labels(end).inc()
        return end

    def _put(self, message: dict[str, Any]) -> None:
        text = json.dumps(message, ensure_ascii=False)
        self._waiting.put_nowait(text)
        self._waiting_bytes += len(text)
        self._ended = self._ended or message.get("type") == "session_ended"
        if self._waiting_bytes > MAX_BUFFERED_BYTES:
            self._slow.set()

    async def _read(self) -> None:
        while True:
            try:
                message = await self._socket.receive()
            except (WebSocketDisconnect, RuntimeError):
                return
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            self._conversation.arrived(message["bytes"] if text is None else text)

    async def _write(self) -> None:
        while not (self._ended and self._waiting.empty()):
            text = await self._waiting.get()
            try:
                async with asyncio.timeout(SEND_LIMIT_S):
                    await self._socket.send_text(text)
            except TimeoutError:
                self._slow.set()
                return
            except (WebSocketDisconnect, RuntimeError):
                return
            self._waiting_bytes -= len(text)
