"""The data channel of one viewer: messages in, checked and rate-limited; state, receipts and figures out.

Knows nothing about peer connections or the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiortc import RTCDataChannel

from streamdiff import clock
from streamdiff.errors import EngineFailure
from streamdiff.serve.control import MAX_MESSAGE_BYTES, MESSAGES_PER_S, Allowance, ControlError, parse
from streamdiff.serve.metrics import Metrics
from streamdiff.serve.session_view import SessionView

STATS_INTERVAL_S = 0.5
MAX_BUFFERED_BYTES = 256 * 1024


class ControlChannel:
    """Speaks with one viewer until `close`. A bad message is answered and changes nothing."""

    def __init__(
        self, channel: RTCDataChannel, viewer: str, view: SessionView, metrics: Metrics, network: Callable[[], str]
    ) -> None:
        """`network` tells how good the viewer's line is: unknown, poor or good."""
        self._channel = channel
        self._viewer = viewer
        self._view = view
        self._metrics = metrics
        self._network = network
        self._messages = Allowance(MESSAGES_PER_S, MESSAGES_PER_S)
        self._complaints = Allowance(1, 1)
        self._inbox: asyncio.Queue[str | bytes] = asyncio.Queue(MESSAGES_PER_S)
        channel.on("message", self._arrived)
        self._tasks = [
            asyncio.create_task(self._obey(), name=f"control-{viewer}"),
            asyncio.create_task(self._report(), name=f"stats-{viewer}"),
        ]
        view.join(viewer, self.send)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message, if the channel is open and the viewer reads."""
        if self._channel.readyState == "open" and self._channel.bufferedAmount < MAX_BUFFERED_BYTES:
            self._channel.send(json.dumps(message, ensure_ascii=False))

    def close(self) -> None:
        """Stop listening and reporting."""
        self._view.leave(self._viewer)
        for task in self._tasks:
            task.cancel()

    def _arrived(self, data: str | bytes) -> None:
        now_s = clock.monotonic_s()
        if not self._messages.take(now_s) or self._inbox.full():
            self._metrics.controls.labels("any", "rate_limited").inc()
            if self._complaints.take(now_s):
                self._refuse(ControlError("rate_limited", f"More than {MESSAGES_PER_S} messages in a second."))
            return
        self._inbox.put_nowait(data)

    def _refuse(self, error: ControlError) -> None:
        self._metrics.controls.labels("any", error.code).inc()
        body = {"type": "error", "id": error.id, "code": error.code, "field": error.field, "message": str(error)}
        self.send(body)

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
            raise ControlError("binary", "Messages are JSON text, not binary.")
        if len(data.encode("utf-8", "replace")) > MAX_MESSAGE_BYTES:
            raise ControlError("too_large", f"A message may have {MAX_MESSAGE_BYTES // 1024} KiB.")
        control = parse(data)
        if control.kind == "get":
            self.send(self._view.state() | {"id": control.id})
        elif control.kind == "ping":
            self.send({"type": "pong", "id": control.id})
        else:
            await self._view.control(control, self._viewer)

    async def _report(self) -> None:
        while True:
            self.send(self._view.stats() | {"network": self._network()})
            await asyncio.sleep(STATS_INTERVAL_S)
