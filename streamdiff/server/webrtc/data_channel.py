"""The data channel of one viewer. Knows nothing about peer connections or the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiortc import RTCDataChannel

from streamdiff.server.metrics import Metrics
from streamdiff.server.sessions.connection import ControlConnection
from streamdiff.server.sessions.live_session import LiveSession

MAX_BUFFERED_BYTES = 256 * 1024


class ControlChannel:
    """A conversation over a data channel. What a viewer that does not read would make pile up is left out."""

    def __init__(
        self,
        channel: RTCDataChannel,
        viewer: str,
        view: LiveSession,
        metrics: Metrics,
        network: Callable[[], str],
        may_control: bool = True,
    ) -> None:
        """See `ControlConnection`."""
        self._channel = channel
        self._conversation = ControlConnection(viewer, view, metrics, self.send, network, may_control)
        self._closed = False
        channel.on("message", self._conversation.arrived)
        channel.on("close", self.close)

    @property
    def open(self) -> bool:
        """Whether the viewer can still use it: neither side has begun to close it."""
        return self._channel.readyState in ("connecting", "open")

    def send(self, message: dict[str, Any]) -> None:
        """Send one message, if the channel is open and the viewer reads."""
        if self._channel.readyState == "open" and self._channel.bufferedAmount < MAX_BUFFERED_BYTES:
            self._channel.send(json.dumps(message, ensure_ascii=False))

    def close(self) -> None:
        """Stop listening and reporting. Does nothing a second time: the viewer may have opened another one by then."""
        if not self._closed:
            self._closed = True
            self._conversation.close()
