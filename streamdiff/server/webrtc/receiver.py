"""The receiving side of one peer connection: video that is sent to a session (WHIP).

Knows nothing about HTTP or sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import av
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError

from streamdiff import clock
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES
from streamdiff.server.webrtc import aiortc_compat

READ = ("h264", "vp8")
"""Codecs that aiortc decodes."""
UNDECODABLE_S = 10.0
_START_KBPS = 2500
"""Chromium begins at 300 kbit/s, which is a small and coarse picture for many seconds, unless the answer says more."""


class VideoReceiver:
    """A peer connection that takes the first video of an offer; sound is turned down. On the event loop.

    `on_frame` is called with every frame, decoded, of whatever size it has by then.
    """

    def __init__(
        self,
        ice_servers: Sequence[RTCIceServer],
        on_frame: Callable[[av.VideoFrame], None],
        on_misuse: Callable[[str], None],
        on_dropped: Callable[[int], None],
    ) -> None:
        """`on_misuse`: see `aiortc_compat.bound_data`; also called with `fault` where video comes of which nothing can
        be decoded for UNDECODABLE_S. `on_dropped`: see `aiortc_compat.DecoderQueue`."""
        self._on_misuse, self._on_dropped = on_misuse, on_dropped
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=list(ice_servers)))
        self._on_frame = on_frame
        self._task: asyncio.Task[None] | None = None
        self._queue: aiortc_compat.DecoderQueue | None = None
        self._heard_s = clock.monotonic_s()
        self._undecoded_s: float | None = None
        """Since when video comes of which nothing could be decoded."""

    def silent_s(self, now_s: float) -> float:
        """Seconds for which nothing has come from the peer, not even STUN or RTCP."""
        return now_s - self._heard_s

    async def answer(self, offer: str) -> str:
        """aiortc's answer to the `sdp` of a checked offer. Mutates: self.

        Raises:
            ValueError, or another of `aiortc_compat.OFFER_ERRORS`: it cannot be answered.
        """
        await self.pc.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        if self.pc.sctp is not None:
            aiortc_compat.bound_data(self.pc.sctp, MAX_MESSAGE_BYTES, self._on_misuse)
        taken: MediaStreamTrack | None = None
        for transceiver in self.pc.getTransceivers():
            video = transceiver.kind == "video" and taken is None
            transceiver.direction = "recvonly" if video else "inactive"
            if video:
                taken = transceiver.receiver.track
                self._queue = aiortc_compat.DecoderQueue(transceiver.receiver, self._on_dropped)
                if aiortc_compat.negotiated_codec(transceiver) is None:
                    raise ValueError("no common video codec")
        assert taken is not None, "a checked offer has video"
        aiortc_compat.listen(self.pc, self._note_heard)
        aiortc_compat.on_media(self.pc, self._check_decodable)
        await self.pc.setLocalDescription(await self.pc.createAnswer())
        self._task = asyncio.create_task(self._receive(taken), name="receive-video")
        return with_start_bitrate(str(self.pc.localDescription.sdp))

    async def close(self, limit_s: float) -> None:
        """Close the connection, by force after `limit_s`. Mutates: self."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await aiortc_compat.close(self.pc, limit_s)
        if self._queue is not None:
            await self._queue.join_decoder(limit_s)

    def _note_heard(self) -> None:
        self._heard_s = clock.monotonic_s()

    def _check_decodable(self) -> None:
        """A packet with video has come."""
        now_s = clock.monotonic_s()
        if self._undecoded_s is None or (self._queue is not None and self._queue.qsize()):  # it is decoded slowly
            self._undecoded_s = now_s
        elif now_s - self._undecoded_s > UNDECODABLE_S:
            self._on_misuse("fault")

    async def _receive(self, track: MediaStreamTrack) -> None:
        """Take frames at once, as aiortc's queue of them has no bound."""
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return  # the connection has ended, which its state says
            if isinstance(frame, av.VideoFrame):
                self._undecoded_s = None
                self._on_frame(frame)


def with_start_bitrate(answer: str) -> str:
    """An answer that lets Chromium begin at _START_KBPS; others do not look at it."""
    lines, out = answer.splitlines(), []
    payloads: set[str] = set()
    for line in lines:
        if line.startswith("m="):
            payloads = set(line.split()[3:]) if line.startswith("m=video") else set()
        name, _, rest = line.partition(":")
        payload = rest.partition(" ")[0]
        is_format = name == "a=fmtp" and payload in payloads and "apt=" not in rest
        out.append(f"{line};x-google-start-bitrate={_START_KBPS}" if is_format else line)
        if name == "a=rtpmap" and payload in payloads and " VP8/" in line:
            out.append(f"a=fmtp:{payload} x-google-start-bitrate={_START_KBPS}")
    return "".join(f"{line}\r\n" for line in out)
