"""What one viewer is sent: a bounded queue of encoded packets, and the track that aiortc reads them from.

Knows nothing about encoders, sessions or how a packet reaches the network.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import av
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack

Packet: TypeAlias = "av.Packet[av.VideoStream]"
TIME_BASE = Fraction(1, 90_000)
QUEUE_PACKETS = 6
"""Encoded frames that may wait for one viewer; 0.15 s at 40 FPS. A viewer further behind skips to a key frame."""


@dataclass(frozen=True)
class Encoded:
    """One encoded frame. `packet` is shared by all viewers of a codec and never written to.

    `pts` counts 90 kHz ticks; `encode_s` is what it took to make, in seconds.
    """

    packet: Packet
    pts: int
    key: bool
    encode_s: float = 0.0


class PacketQueue:
    """Holds what waits for one viewer, newest last. A viewer starts at a key frame, and restarts at one after a loss.

    `put` says whether a key frame is needed before this viewer can go on.
    """

    def __init__(self, limit: int = QUEUE_PACKETS) -> None:
        self._limit = limit
        self._waiting: deque[Encoded] = deque()
        self._needs_key = True
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, encoded: Encoded) -> bool:
        """Queue a packet, or drop it until the next key frame. True: ask the encoder for one. Mutates: self."""
        if encoded.key:
            self.dropped += len(self._waiting) if len(self._waiting) >= self._limit else 0
            if len(self._waiting) >= self._limit:
                self._waiting.clear()
            self._needs_key = False
        elif not self._needs_key and len(self._waiting) >= self._limit:
            self.dropped += len(self._waiting)
            self._waiting.clear()
            self._needs_key = True
        if self._needs_key:
            self.dropped += 1
            return True
        self._waiting.append(encoded)
        return False

    def get(self) -> Encoded | None:
        """The oldest packet that waits. Mutates: self."""
        return self._waiting.popleft() if self._waiting else None


class ViewerTrack(MediaStreamTrack):
    """The video of one viewer. aiortc calls `recv` once the connection stands; that is when `on_start` is called.

    `on_need_key` is called when only a key frame helps. All calls happen on the event loop.
    """

    kind = "video"

    def __init__(self, on_start: Callable[[ViewerTrack], None], on_need_key: Callable[[], None]) -> None:
        super().__init__()
        self._on_start: Callable[[ViewerTrack], None] | None = on_start
        self._on_need_key = on_need_key
        self._queue = PacketQueue()
        self._arrived = asyncio.Event()
        self.sent = 0
        self.estimate_bps = 0

    @property
    def dropped(self) -> int:
        """Encoded frames this viewer did not get."""
        return self._queue.dropped

    def put(self, encoded: Encoded) -> None:
        """Queue one packet for this viewer; called by the encoder's fan-out, on the event loop."""
        if self._queue.put(encoded):
            self._on_need_key()
        self._arrived.set()

    async def recv(self) -> Packet:
        """The next packet, as soon as there is one."""
        if self._on_start is not None:
            start, self._on_start = self._on_start, None
            start(self)
        while True:
            if self.readyState != "live":
                raise MediaStreamError
            encoded = self._queue.get()
            if encoded is not None:
                self.sent += 1
                return encoded.packet
            self._arrived.clear()
            await self._arrived.wait()

    def stop(self) -> None:
        """End the track; a waiting `recv` ends too."""
        super().stop()
        self._arrived.set()
