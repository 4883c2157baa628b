"""The last seconds of what an encoder made: kept in memory while somebody watches, and written as a file that plays."""

from __future__ import annotations

from collections import deque
from io import BytesIO
from typing import NamedTuple

import av

from streamdiff.server.media.encoder import TIME_BASE, Codec, EncodedFrame, Format

KEPT_S = 30.0
"""Seconds that are kept, and up to a key frame (`PERIODIC_KEY_S`) before them."""
MOST_BYTES = 32 << 20
"""Beyond that the oldest go, except what began with the latest key frame."""
LONGEST_STEP = 90_000
"""Ticks that a frame is shown at most: the time that a paused stream stood still is left out."""


class KeptFrame(NamedTuple):
    """An encoded frame, and when it is shown, in ticks of 90 kHz without pauses."""

    ticks: int
    encoded: EncodedFrame


class RecentFrames:
    """The frames of one encoder that were shown in the last `KEPT_S`, in groups that begin with a key frame."""

    def __init__(self) -> None:
        self._groups: deque[list[KeptFrame]] = deque()
        self._ticks = self._pts = self._bytes = 0
        self._needs_key = True

    def put(self, encoded: EncodedFrame, held: bool) -> bool:
        """Keep a frame, unless the stream's time is `held`; True: ask for a key frame, as without one the next frames
        have nothing to follow. Mutates: self."""
        self._needs_key = held or (self._needs_key and not encoded.key)
        if self._needs_key:
            return not held
        if encoded.key:
            self._groups.append([])
        self._ticks += min(encoded.pts - self._pts, LONGEST_STEP)
        self._pts = encoded.pts
        self._bytes += encoded.packet.size
        self._groups[-1].append(KeptFrame(self._ticks, encoded))
        while len(self._groups) > 1 and (
            self._bytes > MOST_BYTES or (self._ticks - self._groups[1][0].ticks) * TIME_BASE >= KEPT_S
        ):
            self._bytes -= sum(each.encoded.packet.size for each in self._groups.popleft())
        return False

    @property
    def kept_s(self) -> float:
        """Seconds from the first frame that is kept to the last."""
        return float((self._ticks - self._groups[0][0].ticks) * TIME_BASE) if self._groups else 0.0

    def last(self, seconds: float) -> list[KeptFrame]:
        """The frames of the last `seconds`, and those before them up to a key frame; none where nothing is kept."""
        found: list[KeptFrame] = []
        for group in reversed(self._groups):
            found = [*group, *found]
            if (self._ticks - group[0].ticks) * TIME_BASE >= seconds:
                break
        return found


def write_clip(codec: Codec, fmt: Format, frames: list[KeptFrame], seconds: float) -> bytes:
    """A file of `frames`, at least one, that plays the last `seconds`: mp4 of H.264; VP8 cannot be cut between key
    frames, so its WebM file begins with the first of `frames`."""
    file, duration = BytesIO(), round(90_000 / fmt.fps)
    begin = max(frames[0].ticks, frames[-1].ticks + duration - round(seconds * 90_000))
    container_format = "mp4" if codec == "h264" else "webm"
    with av.open(file, "w", format=container_format) as container:
        width, height = fmt.width * fmt.scale, fmt.height * fmt.scale
        stream = container.add_mux_stream(codec, rate=round(fmt.fps), width=width, height=height)
        stream.time_base = TIME_BASE
        for ticks, encoded in frames:
            packet = av.Packet(bytes(encoded.packet))
            packet.pts = packet.dts = ticks - begin  # players decode what is before 0, and show it not
            packet.duration, packet.time_base, packet.stream = duration, TIME_BASE, stream
            packet.is_keyframe = encoded.key
            container.mux(packet)
    return file.getvalue()
