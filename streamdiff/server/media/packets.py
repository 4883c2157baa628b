"""Encoded frames and the bounded queue in which they wait for one viewer or output."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import av

Packet: TypeAlias = "av.Packet[av.VideoStream]"

_IDR = re.compile(rb"\x00\x00\x01[\x05\x25\x45\x65]")
"""What begins a key frame of H.264."""

QUEUE_PACKETS = 40
"""Encoded frames that may wait for one viewer, 1 s at 40 FPS. A viewer further behind skips to a key frame.

UDP takes what it is given, so a viewer's line never fills this; a process that gets no CPU for a moment does, and then
a key frame for everybody would make it worse. What waited goes out at once, so the bound adds no delay.
"""


@dataclass(frozen=True)
class EncodedFrame:
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
        self._waiting: deque[EncodedFrame] = deque()
        self._needs_key = True
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, encoded: EncodedFrame) -> bool:
        """Queue a packet, or drop it until the next key frame. True: ask the encoder for one. Mutates: self."""
        if len(self._waiting) >= self._limit:
            self.dropped += len(self._waiting)
            self._waiting.clear()
            self._needs_key = True
        self._needs_key = self._needs_key and not encoded.key
        if self._needs_key:
            self.dropped += 1
            return True
        self._waiting.append(encoded)
        return False

    def get(self) -> EncodedFrame | None:
        """The oldest packet that waits. Mutates: self."""
        return self._waiting.popleft() if self._waiting else None


def is_key_frame(codec: str, data: bytes) -> bool:
    """Whether an encoded frame can be decoded without those before it. `codec`: as SDP names it."""
    if codec == "VP8":
        return bool(data) and not data[0] & 1
    return _IDR.search(data) is not None
