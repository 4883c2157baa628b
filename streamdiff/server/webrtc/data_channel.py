"""The control protocol over a viewer's WebRTC data channel."""

from __future__ import annotations

from collections.abc import Callable

from aiortc import RTCDataChannel

from streamdiff.server.metrics import Metrics
from streamdiff.server.sessions.connection import MAX_BUFFERED_BYTES, ControlConnection
from streamdiff.server.sessions.live_session import LiveSession


class DataChannelConnection(ControlConnection):
    """Control messages over a data channel. Messages to a viewer that does not read are left out."""

    def __init__(
        self,
        channel: RTCDataChannel,
        viewer: str,
        session: LiveSession,
        metrics: Metrics,
        network: Callable[[], str],
        may_control: bool = True,
    ) -> None:
        """See `ControlConnection`."""
        self._channel = channel
        super().__init__(viewer, session, metrics, may_control, network)
        self._closed = False
        channel.on("message", self.on_message)
        channel.on("close", self.close)

    @property
    def open(self) -> bool:
        """Whether the viewer can still use it: neither side has begun to close it."""
        return self._channel.readyState in ("connecting", "open")

    def send_text(self, text: str) -> None:
        if self._channel.readyState == "open" and self._channel.bufferedAmount < MAX_BUFFERED_BYTES:
            self._channel.send(text)

    def close(self) -> None:
        """Stop. Does nothing a second time: the viewer, by the same name, may have opened another one by then."""
        if not self._closed:
            self._closed = True
            super().close()
