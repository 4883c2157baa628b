"""What one viewer is sent: a bounded queue of encoded packets, and the track that aiortc reads them from.

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
    """The video of one viewer. aiortc calls `recv` once the connection stands; that is when `on_start` is called.

    `on_need_key` is called when only a key frame helps. All calls happen on the event loop.
    """

    kind = "video"

    def __init__(
        self,
        on_start: Callable[[ViewerTrack], None],
        on_need_key: Callable[[], None],
        on_first: Callable[[float], None] = lambda since_s: None,
    ) -> None:
        """`on_first` is told, once, how long after the track was made its first packet went out."""
        super().__init__()
        self._on_first = on_first
        self._on_start: Callable[[ViewerTrack], None] | None = on_start
        self._on_need_key = on_need_key
        self._queue = PacketQueue()
        self._arrived = asyncio.Event()
        self._idle = True
        self._asked_s = self._made_s = clock.monotonic_s()
        self._heard_s = self._asked_s
        self._started_s: float | None = None
        self._estimate = (float("-inf"), 0)
        self.sent = 0
        self.loss = 0.0

    @property
    def dropped(self) -> int:
        """Encoded frames this viewer did not get."""
        return self._queue.dropped

    @property
    def waiting(self) -> int:
        """Encoded frames that wait for this viewer."""
        return len(self._queue)

    def heard(self, loss: float | None, now_s: float) -> None:
        """The viewer reported, perhaps which share of the packets it lost. Mutates: self."""
        self._heard_s = now_s
        self.loss = self.loss if loss is None else loss

    def estimated(self, bitrate_bps: int, now_s: float) -> None:
        """The viewer says what its line carries (REMB). Mutates: self."""
        self._heard_s = now_s
        self._estimate = (now_s, bitrate_bps)

    def line_bps(self, now_s: float) -> int | None:
        """Bit/s that the viewer's line carries by its own estimate; None where there is none to rely on."""
        made_s, bitrate_bps = self._estimate
        if self._started_s is None or made_s < self._started_s + TRIAL_S or now_s > made_s + FRESH_S:
            return None
        return bitrate_bps

    def stuck_s(self, now_s: float) -> float:
        """Seconds that a packet has been on its way to the network: aiortc came for no other."""
        return 0.0 if self._idle else now_s - self._asked_s

    def silent_s(self, now_s: float) -> float:
        """Seconds since a viewer that is sent something last reported on it."""
        return 0.0 if self._started_s is None else now_s - max(self._heard_s, self._started_s)

    def put(self, encoded: EncodedFrame) -> None:
        """Queue one packet for this viewer; called by the encoder's fan-out, on the event loop."""
        if self._queue.put(encoded):
            self._on_need_key()
        self._arrived.set()

    async def recv(self) -> Packet:
        """The next packet, as soon as there is one."""
        self._idle = True
        if self._on_start is not None:
            start, self._on_start = self._on_start, None
            self._started_s = clock.monotonic_s()
            start(self)
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
            self._arrived.clear()
            await self._arrived.wait()

    def stop(self) -> None:
        """End the track; a waiting `recv` ends too."""
        super().stop()
        self._arrived.set()
