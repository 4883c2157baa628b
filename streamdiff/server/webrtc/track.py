"""The media track that aiortc sends to one peer: a bounded queue of encoded packets, and what the peer reports.

Knows nothing about encoders, sessions or how a packet reaches the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiortc.mediastreams import MediaStreamError, MediaStreamTrack

from streamdiff import clock
from streamdiff.server.media.bitrate import FRESH_S, TRIAL_S
from streamdiff.server.media.packets import EncodedFrame, Packet, PacketQueue


class ViewerTrack(MediaStreamTrack):
    """The video of one peer. aiortc calls `recv` once the connection stands; that is when `on_start` is called.

    `on_need_key` is called when only a key frame helps. All calls happen on the event loop.
    """

    kind = "video"

    def __init__(
        self,
        on_start: Callable[[ViewerTrack], None],
        on_need_key: Callable[[], None],
        on_first: Callable[[float], None] = lambda since_s: None,
    ) -> None:
        """`on_first` is called once, with the seconds from the track's creation to its first packet."""
        super().__init__()
        self._on_start, self._on_need_key, self._on_first = on_start, on_need_key, on_first
        self._queue = PacketQueue()
        self._available = asyncio.Event()
        self._idle = True
        self._asked_s = self._made_s = clock.monotonic_s()
        self._reported_s = self._asked_s
        self._started_s: float | None = None
        self._estimate = (float("-inf"), 0)
        self.sent = 0

    @property
    def dropped(self) -> int:
        """Encoded frames this viewer did not get."""
        return self._queue.dropped

    @property
    def waiting(self) -> int:
        """Encoded frames that wait for this viewer."""
        return len(self._queue)

    def reported(self, now_s: float) -> None:
        """Note an RTCP report of the peer. Mutates: self."""
        self._reported_s = now_s

    def estimated(self, bitrate_bps: int, now_s: float) -> None:
        """Note the peer's bandwidth estimate (REMB). Mutates: self."""
        self._reported_s = now_s
        self._estimate = (now_s, bitrate_bps)

    def line_bps(self, now_s: float) -> int | None:
        """The peer's bandwidth estimate in bit/s; None where there is none, or none to rely on."""
        made_s, bitrate_bps = self._estimate
        if self._started_s is None or made_s < self._started_s + TRIAL_S or now_s > made_s + FRESH_S:
            return None
        return bitrate_bps

    def stuck_s(self, now_s: float) -> float:
        """Seconds since aiortc took a packet, while it has not come for the next."""
        return 0.0 if self._idle else now_s - self._asked_s

    def silent_s(self, now_s: float) -> float:
        """Seconds since the peer last reported, or since the start; 0 before the start."""
        return 0.0 if self._started_s is None else now_s - max(self._reported_s, self._started_s)

    def put(self, encoded: EncodedFrame) -> None:
        """Queue one packet for this viewer; called by the encoder's fan-out, on the event loop."""
        if self._queue.put(encoded):
            self._on_need_key()
        self._available.set()

    async def recv(self) -> Packet:
        """The next packet, as soon as there is one."""
        self._idle = True
        if self._started_s is None:
            self._started_s = clock.monotonic_s()
            self._on_start(self)
        while True:
            if self.readyState != "live":
                raise MediaStreamError
            encoded = self._queue.get()
            if encoded is not None:
                self.sent += 1
                self._idle, self._asked_s = False, clock.monotonic_s()
                if self.sent == 1:
                    self._on_first(self._asked_s - self._made_s)
                return encoded.packet
            self._available.clear()
            await self._available.wait()

    def stop(self) -> None:
        """End the track; a waiting `recv` ends too."""
        super().stop()
        self._available.set()
