"""Control messages with one peer, whatever carries them: in, checked and rate-limited; state, receipts, figures out.

The same for a data channel and a WebSocket. Knows nothing about either, or about the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from streamdiff import clock
from streamdiff.errors import EngineFailure
from streamdiff.server.metrics import Metrics
from streamdiff.server.rate_limit import TokenBucket
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES, MESSAGES_PER_S, ControlError, parse
from streamdiff.server.sessions.live_session import LiveSession

STATS_INTERVAL_S = 0.5


class ControlConnection:
    """Speaks with one peer until `close`. A bad message is answered and changes nothing."""

    def __init__(
        self,
        peer: str,
        view: LiveSession,
        metrics: Metrics,
        send: Callable[[dict[str, Any]], None],
        network: Callable[[], str],
        may_control: bool = True,
    ) -> None:
        """`send` takes a message to the peer and never waits; `network` tells how good its line is: unknown, poor or
        good; `may_control`: whether it may change anything."""
        self._peer = peer
        self._view = view
        self._metrics = metrics
        self._send = send
        self._network = network
        self._may_control = may_control
        self._messages = TokenBucket(MESSAGES_PER_S, MESSAGES_PER_S)
        self._complaints = TokenBucket(1, 1)
        self._inbox: asyncio.Queue[str | bytes] = asyncio.Queue(MESSAGES_PER_S)
        self._tasks = [
            asyncio.create_task(self._obey(), name=f"control-{peer}"),
            asyncio.create_task(self._report(), name=f"stats-{peer}"),
        ]
        view.join(peer, self._send, may_control)

    def close(self) -> None:
        """Stop listening and reporting."""
        self._view.leave(self._peer)
        for task in self._tasks:
            task.cancel()

    def arrived(self, data: str | bytes) -> None:
        """The peer has sent something."""
        now_s = clock.monotonic_s()
        if not self._messages.take(now_s) or self._inbox.full():
            self._metrics.controls.labels("any", "rate_limited").inc()
            if self._complaints.take(now_s):
                self._refuse(ControlError("rate_limited", f"More than {MESSAGES_PER_S} messages in a second."))
            return
        # Before it is kept: what waits here is bounded in bytes too.
        if (len(data) if isinstance(data, bytes) else len(data.encode("utf-8", "replace"))) > MAX_MESSAGE_BYTES:
            self._refuse(ControlError("too_large", f"A message may have {MAX_MESSAGE_BYTES // 1024} KiB."))
            return
        self._inbox.put_nowait(data)

    def _refuse(self, error: ControlError) -> None:
        self._metrics.controls.labels("any", error.code).inc()
        body = {"type": "error", "id": error.id, "code": error.code, "field": error.field, "message": str(error)}
        self._send(body)

    async def _obey(self) -> None:
        while True:
            data = await self._inbox.get()
            try:
                await self._obey_one(data)
            except ControlError as error:
                self._refuse(error)
            except EngineFailure as error:
                self._refuse(ControlError("engine_ended", f"The engine stopped: {error}"))

    async def _obey_one(self, data: str | bytes) -> None:
        if isinstance(data, bytes):
            raise ControlError("binary", "Messages are JSON text in UTF-8, not binary.")
        control = parse(data)
        if control.changes and not self._may_control:
            raise ControlError("forbidden", "You may watch, not steer: that takes the control token.", id=control.id)
        if control.kind == "get":
            self._send(self._view.state(self._may_control) | {"id": control.id})
        elif control.kind == "ping":
            self._send({"type": "pong", "id": control.id})
        else:
            await self._view.control(control, self._peer)

    async def _report(self) -> None:
        while True:
            self._send(self._view.stats() | {"network": self._network()})
            await asyncio.sleep(STATS_INTERVAL_S)
