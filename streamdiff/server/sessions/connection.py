"""The control protocol with one peer: messages in, checked and rate-limited; state, receipts and statistics out.

Base of the data channel (`webrtc.data_channel`) and the WebSocket (`routes.control`).
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from typing import Any

from streamdiff import clock
from streamdiff.errors import EngineFailure
from streamdiff.server.metrics import Metrics
from streamdiff.server.peers import TokenBucket
from streamdiff.server.sessions import control
from streamdiff.server.sessions.control import CONTROLS_PER_S, MAX_MESSAGE_BYTES, MESSAGES_PER_S, ControlError
from streamdiff.server.sessions.live_session import LiveSession

STATS_INTERVAL_S = 0.5
MAX_BUFFERED_BYTES = 256 * 1024
"""Messages that may wait for a peer that does not read."""


class ControlConnection(ABC):
    """One peer's control messages, until `close`. A bad message is answered and changes nothing. Lives on the event
    loop; a subclass carries the text."""

    def __init__(self, peer: str, session: LiveSession, metrics: Metrics, may_control: bool = True) -> None:
        """`peer` is its unique name; `may_control`: whether it may change anything. Sends the state at once."""
        self._peer, self._session, self._metrics, self._may_control = peer, session, metrics, may_control
        self._closed = False
        self._messages = TokenBucket(MESSAGES_PER_S, MESSAGES_PER_S)
        self._controls = TokenBucket(CONTROLS_PER_S, CONTROLS_PER_S)
        self._rate_errors = TokenBucket(1, 1)
        self._inbox: asyncio.Queue[str | bytes] = asyncio.Queue(MESSAGES_PER_S + CONTROLS_PER_S)
        self._tasks = [
            asyncio.create_task(self._process_inbox(), name=f"control-{peer}"),
            asyncio.create_task(self._send_stats(), name=f"stats-{peer}"),
        ]
        self._watcher = session.join(peer, self.send, may_control)

    @abstractmethod
    def send_text(self, text: str) -> None:
        """Send one message to the peer, or leave it out; never waits."""

    def network(self) -> str:
        """How good the peer's line is: unknown, poor or good."""
        return "unknown"

    def send(self, message: dict[str, Any]) -> None:
        """Send one message as JSON."""
        self.send_text(json.dumps(message, ensure_ascii=False))

    def close(self) -> None:
        """Stop receiving and reporting. Does nothing a second time: the peer, by the same name, may have opened another
        connection by then. Mutates: self."""
        if self._closed:
            return
        self._closed = True
        self._session.leave(self._peer)
        for task in self._tasks:
            task.cancel()

    def on_message(self, data: str | bytes) -> None:
        """Take a message of the peer: queued, or refused where too many come or it is too large. Mutates: self."""
        now_s = clock.monotonic_s()
        # Not parsed before it is counted: what only looks like a control costs no more than one.
        holds = isinstance(data, str) and '"control"' in data[:200]
        bucket, limit = (self._controls, CONTROLS_PER_S) if holds else (self._messages, MESSAGES_PER_S)
        if not bucket.take(now_s) or self._inbox.full():
            self._metrics.controls.labels("any", "rate_limited").inc()
            if self._rate_errors.take(now_s):
                self._refuse(ControlError("rate_limited", f"More than {limit} messages in a second."))
            return
        # Before it is kept: what waits here is bounded in bytes too.
        if (len(data) if isinstance(data, bytes) else len(data.encode("utf-8", "replace"))) > MAX_MESSAGE_BYTES:
            self._refuse(ControlError("too_large", f"A message may have {MAX_MESSAGE_BYTES // 1024} KiB."))
            return
        self._inbox.put_nowait(data)

    def _refuse(self, error: ControlError) -> None:
        self._metrics.controls.labels("any", error.code).inc()
        body = {"type": "error", "id": error.id, "code": error.code, "field": error.field, "message": str(error)}
        self.send(body)

    async def _process_inbox(self) -> None:
        while True:
            data = await self._inbox.get()
            try:
                await self._carry_out(data)
            except ControlError as error:
                self._refuse(error)
            except EngineFailure as error:
                self._refuse(ControlError("engine_ended", f"The engine stopped: {error}"))

    async def _carry_out(self, data: str | bytes) -> None:
        if isinstance(data, bytes):
            raise ControlError("binary", "Messages are JSON text in UTF-8, not binary.")
        message = control.parse(data)
        wheel, watcher = self._session.wheel, self._watcher
        if isinstance(message, control.ChangeMessage) and not (self._may_control or wheel.holds(watcher)):
            why = "You may watch, not steer: that takes the control token or the wheel."
            raise ControlError("forbidden", why, id=message.id)
        wheel.check(message, watcher)
        if message.type == "get":
            self.send(self._session.state(self._may_control) | {"id": message.id})
        elif message.type == "wheel":
            wheel.carry_out(message, watcher)
            self.send({"type": "wheel", "id": message.id, **wheel.state()})
        elif message.type == "ping":
            self.send({"type": "pong", "id": message.id})
        else:
            await self._session.control(message, self._peer)

    async def _send_stats(self) -> None:
        while True:
            self.send(self._session.stats() | {"network": self.network()})
            await asyncio.sleep(STATS_INTERVAL_S)
