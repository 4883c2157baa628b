"""WHIP (RFC 9725): a live session published to a media server, in the packets that viewers get.

By aiortc, as it hears a wish for a key frame and sends again what was lost; FFmpeg's own WHIP muxer hears no such wish,
and as PyAV 18.1 has it, its DTLS did not get through to aiortc. Knows nothing about retries (`outputs`).
"""

from __future__ import annotations

import contextlib
from urllib.parse import unquote, urljoin, urlsplit

import httpx
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from streamdiff import clock
from streamdiff.server.media.codecs import Codec
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.rate_limit import TokenBucket
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.sdp import without_unusable
from streamdiff.server.webrtc.track import ViewerTrack
from streamdiff.server.webrtc.viewers import KEY_WISH_BURST, KEY_WISHES_PER_S, SILENT_S, STUCK_S, preferences

CONNECT_S = 10.0
"""The media server's answer, and then the connection, may each take so long."""
CLOSE_S = 2.0
PREFIX = "whip+"


class WhipError(Exception):
    """A publication that cannot begin; the text says why, without the address: a key is often part of it."""


class Publication:
    """One publication: `open`, then look for a `fault` now and then, and `close` in any case."""

    def __init__(self, url: str, fanout: Fanout, codec: Codec) -> None:
        """`url` is `whip+https://[TOKEN@]HOST[:PORT]/PATH`, or `whip+http://...`; the token is sent as a bearer's."""
        parts = urlsplit(url.removeprefix(PREFIX))
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._headers = {"Authorization": f"Bearer {unquote(parts.username)}"} if parts.username else {}
        self._fanout = fanout
        self._codec = codec
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._wishes = TokenBucket(KEY_WISHES_PER_S, KEY_WISH_BURST)
        self._resource: str | None = None
        self._resource_headers = self._headers
        self._opened_s = 0.0
        self.track = ViewerTrack(lambda track: fanout.attach(codec, track), lambda: fanout.request_key(codec))

    async def open(self) -> None:
        """Offer the stream and take the answer; the packets begin when the connection stands. Mutates: self.

        Raises:
            WhipError: nobody there, a refusal, or an answer that cannot be used.
        """
        transceiver = self._pc.addTransceiver(self.track, direction="sendonly")
        transceiver.setCodecPreferences(preferences((self._codec,)))
        await self._pc.setLocalDescription(await self._pc.createOffer())
        answer = await self._post(str(self._pc.localDescription.sdp))
        try:
            await self._pc.setRemoteDescription(RTCSessionDescription(without_unusable(answer), "answer"))
        except aiortc_compat.OFFER_ERRORS as error:
            raise WhipError(f"the media server's answer cannot be used ({type(error).__name__})") from error
        codec = aiortc_compat.negotiated_codec(transceiver)
        if codec is None or transceiver.currentDirection != "sendonly":
            raise WhipError(f"the media server does not take {self._codec.upper()} video")
        aiortc_compat.hook_sender(
            transceiver.sender,
            codec,
            self._wished_key,
            # What this line carries must not lower the viewers' picture: only that it spoke is noted.
            lambda _: self.track.heard(None, clock.monotonic_s()),
            lambda loss: self.track.heard(loss, clock.monotonic_s()),
        )
        self._opened_s = clock.monotonic_s()

    def fault(self, now_s: float) -> str | None:
        """What is wrong with the connection; None: nothing."""
        state = self._pc.connectionState
        if state in ("failed", "closed"):
            return f"the connection to the media server has {'failed' if state == 'failed' else 'been closed'}"
        if state != "connected" and now_s - self._opened_s > CONNECT_S:
            return f"no connection to the media server within {CONNECT_S:g} s"
        if self.track.stuck_s(now_s) > STUCK_S or self.track.silent_s(now_s) > SILENT_S:
            return "the media server takes nothing any more"
        return None

    async def close(self) -> None:
        """Take leave of the media server, as far as it listens. Mutates: self."""
        await aiortc_compat.close(self._pc, CLOSE_S)
        self._fanout.detach(self._codec, self.track)  # not before: a connection may have stood at the last moment
        if self._resource is not None:
            with contextlib.suppress(httpx.HTTPError):
                async with httpx.AsyncClient(timeout=CLOSE_S, follow_redirects=True) as http:
                    await http.delete(self._resource, headers=self._resource_headers)

    async def _post(self, offer: str) -> str:
        """The answer to an offer. Mutates: self."""
        try:
            async with httpx.AsyncClient(timeout=CONNECT_S, follow_redirects=True) as http:
                headers = {**self._headers, "Content-Type": "application/sdp"}
                response = await http.post(self._url, content=offer, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WhipError(f"the media server cannot be reached ({type(error).__name__})") from error
        if response.status_code != 201:
            raise WhipError(f"the media server answered {response.status_code} {response.reason_phrase}")
        if "location" in response.headers:
            self._resource = urljoin(str(response.url), response.headers["location"])
            if _origin(self._resource) != _origin(str(response.url)):
                self._resource_headers = {}  # the token is for the server that took it
        return response.text

    def _wished_key(self) -> None:
        if self._wishes.take(clock.monotonic_s()):
            self._fanout.request_key(self._codec)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
