"""The sending side of one peer connection: to a viewer (WHEP) or to a media server (WHIP).

Knows nothing about signalling, sessions or retries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCRtpSender, RTCRtpTransceiver

from streamdiff import clock
from streamdiff.server.media.codecs import Codec
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.rate_limit import TokenBucket
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.track import ViewerTrack

KEY_REQUESTS_PER_S, KEY_REQUEST_BURST = 1.0, 5.0
"""Key frame requests (PLI, FIR) of one peer that are met: every key frame costs all the others bits."""
RESENT_PER_S, RESEND_BURST = 2000.0, 1024.0
"""Packets that one peer is sent again (NACK): a few bytes ask for each. The burst is all that is kept for it."""
STUCK_S = 10.0
"""A peer whose packets do not get away for so long is given up, and so is one whose codec's encoder fails so long."""
SILENT_S = 30.0
"""So is one that is sent video and sends no report about it."""

_MIME: dict[str, Codec] = {"video/h264": "h264", "video/vp8": "vp8"}


class VideoSender:
    """A peer connection with one video track, attached to a session's fan-out while it runs. On the event loop.

    `codec` is the negotiated one, None before `bind`.
    """

    def __init__(
        self,
        fanout: Fanout,
        ice_servers: Sequence[RTCIceServer] = (),
        *,
        on_first: Callable[[float], None] = lambda since_s: None,
        on_key_request: Callable[[bool], None] = lambda is_met: None,
        adapts_bitrate: bool = True,
    ) -> None:
        """`on_first` gets the seconds until the first packet; `on_key_request` is called for every request of the peer,
        with whether it is met; `adapts_bitrate`: whether the peer's bandwidth estimates count for the encoder's rate.
        """
        # Without an explicit (here often empty) list aiortc asks a public STUN server and waits for it.
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=list(ice_servers)))
        self.codec: Codec | None = None
        self.track = ViewerTrack(self._attach, self.request_key, on_first)
        self._fanout, self._on_key_request, self._adapts_bitrate = fanout, on_key_request, adapts_bitrate
        self._key_requests = TokenBucket(KEY_REQUESTS_PER_S, KEY_REQUEST_BURST)
        self._resends = TokenBucket(RESENT_PER_S, RESEND_BURST)
        self._closed = False

    def add_transceiver(self, codecs: Sequence[Codec]) -> RTCRtpTransceiver:
        """The transceiver of the track, with the codecs that may be negotiated, best first. Mutates: self.pc."""
        transceiver = self.pc.addTransceiver(self.track, direction="sendonly")
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
        hooks = (self._key_requested, self._take_estimate, self._take_report, self._may_resend)
        aiortc_compat.hook_sender(transceiver.sender, negotiated, *hooks)
        return True

    def request_key(self) -> None:
        """The peer can go on only from a key frame."""
        if self.codec is not None:
            self._fanout.request_key(self.codec)

    def fault(self, now_s: float) -> Literal["stuck", "silent", "encoder"] | None:
        """Why the peer should be given up: it takes or reports nothing any more, or there is nothing to send, as the
        codec cannot be encoded; None: it should not."""
        if self.track.stuck_s(now_s) > STUCK_S:
            return "stuck"
        if self.codec is not None and self._fanout.failing_s(self.codec, now_s) > STUCK_S:
            return "encoder"
        return "silent" if self.track.silent_s(now_s) > SILENT_S else None

    async def close(self, limit_s: float) -> bool:
        """Detach, and close the connection; whether that took no longer than `limit_s`. Mutates: self."""
        self._closed = True
        if self.codec is not None:
            self._fanout.detach(self.codec, self.track)
        return await aiortc_compat.close(self.pc, limit_s)

    def _attach(self, track: ViewerTrack) -> None:
        """The connection stands."""
        if self.codec is not None and not self._closed:
            self._fanout.attach(self.codec, track)

    def _key_requested(self) -> None:
        is_met = self._key_requests.take(clock.monotonic_s())
        self._on_key_request(is_met)
        if is_met:
            self.request_key()

    def _may_resend(self) -> bool:
        return self._resends.take(clock.monotonic_s())

    def _take_estimate(self, bitrate_bps: int) -> None:
        if self._adapts_bitrate:
            self.track.estimated(bitrate_bps, clock.monotonic_s())

    def _take_report(self) -> None:
        self.track.reported(clock.monotonic_s())


def _codec_of(known: Any) -> Codec | None:
    """The codec of aiortc's parameters or capabilities; None for any other."""
    return _MIME.get(known.mimeType.lower())
