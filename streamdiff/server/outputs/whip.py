"""WHIP (RFC 9725): a live session published to a media server, in the packets that viewers get.

By aiortc, which takes requests for key frames and sends again what was lost; FFmpeg's own WHIP muxer takes none, and as
PyAV 18.1 has it, its DTLS did not get through to aiortc. Knows nothing about retries (`outputs.output`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from urllib.parse import unquote, urljoin, urlsplit

import httpx
from aiortc import RTCIceServer, RTCSessionDescription

from streamdiff import clock
from streamdiff.server.media.codecs import Codec
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.sdp import without_unusable
from streamdiff.server.webrtc.sender import VideoSender

CONNECT_S = 10.0
"""The media server's answer, and then the connection, may each take so long."""
CLOSE_S = 2.0
MAX_ANSWER_BYTES, MAX_REDIRECTS = 256 * 1024, 5
PREFIX = "whip+"


class WhipError(Exception):
    """A publication that cannot begin; the text says why, without the address: a key is often part of it."""


class Publication:
    """One WHIP publication: `open`, then ask for a `fault` regularly, and `close` in any case."""

    def __init__(
        self,
        url: str,
        fanout: Fanout,
        codec: Codec,
        allows: Callable[[str], bool],
        ice_servers: Sequence[RTCIceServer] = (),
    ) -> None:
        """`url` is `whip+https://[TOKEN@]HOST[:PORT]/PATH`, or `whip+http://...`; the token is sent as a bearer's.
        `allows` says of an address of that form whether the server may speak to it where a media server at another
        one names it."""
        parts = urlsplit(url.removeprefix(PREFIX))
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._headers = {"Authorization": f"Bearer {unquote(parts.username)}"} if parts.username else {}
        self._codec, self._allows = codec, allows
        # What this line carries must not lower the viewers' picture.
        self.sender = VideoSender(fanout, ice_servers, adapts_bitrate=False)
        self._resource: str | None = None
        self._resource_headers = self._headers
        self._opened_s = 0.0

    async def open(self) -> None:
        """Offer the stream and take the answer; the packets begin when the connection stands. Mutates: self.

        Raises:
            WhipError: nobody there, a refusal, or an answer that cannot be used.
        """
        transceiver = self.sender.add_transceiver((self._codec,))
        await self.sender.pc.setLocalDescription(await self.sender.pc.createOffer())
        answer = await self._post(str(self.sender.pc.localDescription.sdp))
        try:
            await self.sender.pc.setRemoteDescription(RTCSessionDescription(without_unusable(answer), "answer"))
        except aiortc_compat.OFFER_ERRORS as error:
            raise WhipError(f"the media server's answer cannot be used ({type(error).__name__})") from error
        if not self.sender.bind(transceiver) or transceiver.currentDirection != "sendonly":
            raise WhipError(f"the media server does not take {self._codec.upper()} video")
        self._opened_s = clock.monotonic_s()

    def fault(self, now_s: float) -> str | None:
        """What is wrong with the connection; None: nothing."""
        state = self.sender.pc.connectionState
        if state in ("failed", "closed"):
            return f"the connection to the media server has {'failed' if state == 'failed' else 'been closed'}"
        if state != "connected" and now_s - self._opened_s > CONNECT_S:
            return f"no connection to the media server within {CONNECT_S:g} s"
        if (fault := self.sender.fault(now_s)) is not None:
            if fault == "encoder":
                return f"{self._codec.upper()} cannot be encoded"
            return "the media server takes nothing any more"
        return None

    async def close(self) -> None:
        """Close the connection, and delete the resource at the media server if it answers. Mutates: self."""
        await self.sender.close(CLOSE_S)
        if self._resource is not None:
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with (
                    asyncio.timeout(CLOSE_S),
                    httpx.AsyncClient() as http,
                    http.stream("DELETE", self._resource, headers=self._resource_headers),
                ):
                    pass

    async def _post(self, offer: str) -> str:
        """The answer to an offer. Mutates: self."""
        headers = {**self._headers, "Content-Type": "application/sdp", "Accept-Encoding": "identity"}
        try:
            url = httpx.URL(self._url)
            async with asyncio.timeout(CONNECT_S), httpx.AsyncClient(timeout=CONNECT_S) as http:
                for _ in range(MAX_REDIRECTS):
                    request = http.build_request("POST", url, content=offer, headers=headers)
                    response = await http.send(request, stream=True)
                    if response.status_code not in (307, 308):
                        return await self._answer(response)
                    await response.aclose()
                    target = self._named(response)
                    if target is None:
                        raise WhipError("the media server redirects to an address that is not allowed")
                    if not _is_same_origin(target, url):
                        headers.pop("Authorization", None)  # the token is for the server that was named
                    url = target
        except TimeoutError as error:
            raise WhipError(f"the media server gave no whole answer within {CONNECT_S:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WhipError(f"the media server cannot be reached ({type(error).__name__})") from error
        raise WhipError(f"the media server redirects more than {MAX_REDIRECTS} times")

    async def _answer(self, response: httpx.Response) -> str:
        """The SDP of a response that is still to be read. Mutates: self."""
        if response.status_code != 201:
            raise WhipError(f"the media server answered {response.status_code} {response.reason_phrase}")
        if "location" in response.headers and (resource := self._named(response)) is not None:
            self._resource = str(resource)
            if not _is_same_origin(resource, response.url) or "authorization" not in response.request.headers:
                self._resource_headers = {}  # the token is for the server that took it
        body = b""
        async for piece in response.aiter_raw():
            if len(body := body + piece) > MAX_ANSWER_BYTES:
                raise WhipError(f"the media server's answer is larger than {MAX_ANSWER_BYTES // 1024} KiB")
        return body.decode(errors="replace")

    def _named(self, response: httpx.Response) -> httpx.URL | None:
        """The address that a response names; None for one at another origin that is not allowed."""
        try:
            named = httpx.URL(urljoin(str(response.url), response.headers.get("location", "")))
        except (ValueError, httpx.InvalidURL) as error:
            raise WhipError("the media server's answer names an address that is none") from error
        return named if _is_same_origin(named, response.url) or self._allows(f"{PREFIX}{named}") else None


def _is_same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)
