"""The sending side of one peer connection: to a viewer (WHEP) or to a media server (WHIP).

Knows nothing about signalling, sessions or retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCRtpSender, RTCRtpTransceiver
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack

from streamdiff import clock
from streamdiff.server.media.encoder import Codec, EncodedFrame, Packet, PacketQueue
from streamdiff.server.media.playback import FRESH_S, TRIAL_S, Playback
from streamdiff.server.metrics import Metrics
from streamdiff.server.peers import TokenBucket
from streamdiff.server.webrtc import aiortc_compat

KEY_REQUESTS_PER_S, KEY_REQUEST_BURST = 1.0, 5.0
"""Key frame requests (PLI, FIR) of one peer that are met: every key frame costs all the others bits."""
RESENT_PER_S, RESEND_BURST = 2000.0, 1024.0
"""Packets that one peer is sent again (NACK): a few bytes ask for each. The burst is all that is kept for it."""
STUCK_S = 10.0
"""A peer whose packets do not get away for so long is given up, and so is one whose codec's encoder fails so long."""
SILENT_S = 30.0
"""So is one that is sent video and sends no report about it."""

_MIME: dict[str, Codec] = {"video/h264": "h264", "video/vp8": "vp8"}


class VideoSender(MediaStreamTrack):
    """A peer connection and its one video track: a bounded queue of encoded packets, attached to a session's fan-out
    from the moment that the connection stands and aiortc calls `recv`. On the event loop.

    `codec` is the negotiated one, None before `bind`; `sent`: how many frames were.
    """

    kind = "video"

    def __init__(
        self,
        playback: Playback,
        ice_servers: Sequence[RTCIceServer] = (),
        metrics: Metrics | None = None,
    ) -> None:
        """`metrics`: those of viewers; None: the peer is none, and its bandwidth estimates do not count for the
        encoder's rate."""
        super().__init__()
        # Without an explicit (here often empty) list aiortc asks a public STUN server and waits for it.
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=list(ice_servers)))
        self.codec: Codec | None = None
        self.sent = 0
        self._playback, self._metrics = playback, metrics
        self._key_requests = TokenBucket(KEY_REQUESTS_PER_S, KEY_REQUEST_BURST)
        self._queue = PacketQueue()
        self._available = asyncio.Event()
        self._idle = True  # aiortc waits for a packet
        self._made_s = self._asked_s = self._reported_s = clock.monotonic_s()
        self._started_s: float | None = None
        self._estimate = (float("-inf"), 0)  # when, and bit/s
        self._closed = False

    # ---- negotiation and end ------------------------------------------------------------------------------------

    def add_transceiver(self, codecs: Sequence[Codec]) -> RTCRtpTransceiver:
        """The transceiver of the track, with the codecs that may be negotiated, best first. Mutates: self.pc."""
        transceiver = self.pc.addTransceiver(self, direction="sendonly")
        known = RTCRtpSender.getCapabilities("video").codecs
        ordered = [each for codec in codecs for each in known if _codec_of(each) == codec]
        # aiortc takes preferences only before it sees the peer's description.
        transceiver.setCodecPreferences(ordered + [each for each in known if each.mimeType.lower() == "video/rtx"])
        return transceiver

    def bind(self, transceiver: RTCRtpTransceiver) -> bool:
        """Send encoded packets in the negotiated codec; False: there is none. After `setRemoteDescription`.

        Mutates: self, and what `transceiver` sends with.
        """
        negotiated = aiortc_compat.negotiated_codec(transceiver)
        self.codec = _codec_of(negotiated) if negotiated is not None else None
        if self.codec is None:
            return False
        resends = TokenBucket(RESENT_PER_S, RESEND_BURST)
        hooks = (self._key_requested, self._take_estimate, self._take_report)
        aiortc_compat.hook_sender(transceiver.sender, *hooks, lambda: resends.take(clock.monotonic_s()))
        return True

    async def close(self, limit_s: float) -> bool:
        """Detach, and close the connection; whether that took no longer than `limit_s`. Mutates: self."""
        self._closed = True
        if self.codec is not None:
            self._playback.detach(self.codec, self.put)
        return await aiortc_compat.close(self.pc, limit_s)

    # ---- packets: from the fan-out, to aiortc ----------------------------------------------------------------------

    def put(self, encoded: EncodedFrame) -> None:
        """Queue one packet; called by the fan-out."""
        dropped = self._queue.dropped
        if self._queue.put(encoded):
            self.request_key()
        if self._metrics is not None:
            self._metrics.viewer_dropped.inc(self._queue.dropped - dropped)
        self._available.set()

    async def recv(self) -> Packet:
        """The next packet, as soon as there is one."""
        self._idle = True
        if self._started_s is None:
            self._started_s = clock.monotonic_s()
            if self.codec is not None and not self._closed:
                self._playback.attach(self.codec, self.put, self.line_bps)
        while self.readyState == "live":
            encoded = self._queue.get()
            if encoded is not None:
                self.sent += 1
                self._idle, self._asked_s = False, clock.monotonic_s()
                if self.sent == 1 and self._metrics is not None:
                    self._metrics.viewer_first_s.observe(self._asked_s - self._made_s)
                return encoded.packet
            self._available.clear()
            await self._available.wait()
        raise MediaStreamError

    def stop(self) -> None:
        """End the track; a waiting `recv` ends too."""
        super().stop()
        self._available.set()

    def request_key(self) -> None:
        """The peer can continue only from a key frame."""
        if self.codec is not None:
            self._playback.request_key(self.codec)

    # ---- figures ---------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """Encoded frames that the peer did not get."""
        return self._queue.dropped

    @property
    def waiting(self) -> int:
        """Encoded frames that wait for the peer."""
        return len(self._queue)

    def line_bps(self, now_s: float) -> int | None:
        """The peer's bandwidth estimate in bit/s; None where there is none, or none to rely on."""
        made_s, bitrate_bps = self._estimate
        if self._started_s is None or made_s < self._started_s + TRIAL_S or now_s > made_s + FRESH_S:
            return None
        return bitrate_bps

    def silent_s(self, now_s: float) -> float:
        """Seconds since the peer last reported, or since the start; 0 before the start."""
        return 0.0 if self._started_s is None else now_s - max(self._reported_s, self._started_s)

    def fault(self, now_s: float) -> Literal["stuck", "silent", "encoder"] | None:
        """Why the peer should be given up: it takes or reports nothing any more, or there is nothing to send, as the
        codec cannot be encoded; None: it should not."""
        if not self._idle and now_s - self._asked_s > STUCK_S:
            return "stuck"
        if self.codec is not None and self._playback.failing_s(self.codec, now_s) > STUCK_S:
            return "encoder"
        return "silent" if self.silent_s(now_s) > SILENT_S else None

    # ---- what the peer sends ---------------------------------------------------------------------------------------

    def _key_requested(self) -> None:
        is_met, metrics = self._key_requests.take(clock.monotonic_s()), self._metrics
        if metrics is not None:
            (metrics.keyframe_requests if is_met else metrics.keyframe_requests_refused).inc()
        if is_met:
            self.request_key()

    def _take_estimate(self, bitrate_bps: int) -> None:
        if self._metrics is not None:
            self._reported_s = clock.monotonic_s()
            self._estimate = (self._reported_s, bitrate_bps)

    def _take_report(self) -> None:
        self._reported_s = clock.monotonic_s()


def _codec_of(known: Any) -> Codec | None:
    """The codec of aiortc's parameters or capabilities; None for any other."""
    return _MIME.get(known.mimeType.lower())
