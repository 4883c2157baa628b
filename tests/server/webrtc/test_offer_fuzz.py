"""Offers and candidates of strangers, damaged at random: the answer is never a 5xx, and nothing breaks afterwards.

The real application, without sockets of its own: 2,000 cases in all, another choice every time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamdiff.config import Config, ServeConfig
from streamdiff.server.app import attach_engine, create_app
from streamdiff.server.webrtc import peer_connections
from tests.server.conftest import InMemoryClient
from tests.server.scripted import Painter
from tests.server.webrtc.test_sdp import BAD_CANDIDATES, _offer

pytestmark = pytest.mark.slow

OFFERS, FRAGMENTS = ([few, pytest.param(many, marks=pytest.mark.soak)] for few, many in ((400, 1200), (300, 800)))
VISITS = 40
"""Fragments that one viewer is sent; its candidates stay with it."""
LIST = "a=candidate:1 1 udp 2122260223 192.0.2.9 50000 typ srflx raddr 192.0.2.8 rport 50001 generation 0 ufrag abcd"
LINES = [
    LIST,
    *(f"a=candidate:{each}" for each in BAD_CANDIDATES),
    "m=video 9 UDP/TLS/RTP/SAVPF 97 98",
    "m=application 9 UDP/DTLS/SCTP webrtc-datachannel",
    "c=IN IP4 0.0.0.0",
    "a=mid:0",
    "a=group:BUNDLE 0 1",
    "a=ice-ufrag:abcd",
    "a=ice-pwd:0123456789012345678901",
    "a=ice-lite",
    "a=end-of-candidates",
    "a=fingerprint:sha-256 " + ":".join(["AB"] * 32),
    "a=setup:actpass",
    "a=rtpmap:97 H264/90000",
    "a=fmtp:97 packetization-mode=1;profile-level-id=42e01f",
    "a=rtcp-fb:97 nack pli",
    "a=extmap:1 urn:ietf:params:rtp-hdrext:sdes:mid",
    "a=ssrc:1001 cname:x",
    "a=ssrc-group:FID 1001 1002",
    "a=rtcp:9 IN IP4 0.0.0.0",
    "a=sctp-port:5000",
    "a=sctpmap:5000 webrtc-datachannel 256",
    "a=max-message-size:262144",
    "a=simulcast:recv 1;2",
    "a=bundle-only",
    "a=inactive",
    "m=video 0 UDP/TLS/RTP/SAVPF 97",
    "m=audio 9 UDP/TLS/RTP/SAVPF 111",
    "m=text 9 UDP/TLS/RTP/SAVPF 98",
]
HOSTILE = [
    "\u00b2", "\u0663", "9" * 5000, "-1", "0", "65536", "4294967296", "1e999", "x", "", "*", "\x00", "\u2028", "%",
]  # fmt: skip

tokens = st.sampled_from(HOSTILE) | st.integers(-1, 2**33).map(str) | st.text(max_size=8)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """`text` after one to four of: a word replaced, a line left out, put in, doubled or moved, an end cut off."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["word", "word", "word", "line", "out", "double", "move", "cut"])):
            case "word":
                gap = draw(st.sampled_from([" ", ":", "/", ";"]))
                words = lines[at].split(gap)
                words[draw(st.integers(0, len(words) - 1))] = draw(tokens)
                lines[at] = gap.join(words)
            case "line":
                lines.insert(at, draw(st.sampled_from(LINES) | st.text(max_size=20)))
            case "out":
                del lines[at]
            case "double":
                lines.insert(at, lines[at])
            case "move":
                lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
            case "cut":
                lines = lines[: max(at, 1)]
        if not lines:
            break
    return "\r\n".join(lines) + "\r\n"


@dataclass
class Server:
    """The application, called on an event loop that runs only meanwhile."""

    runner: asyncio.Runner
    app: FastAPI
    http: httpx.AsyncClient
    offer: str
    errors: list[dict[str, Any]] = field(default_factory=list)

    def send(self, method: str, path: str, body: str, kind: str) -> httpx.Response:
        content = body.encode("utf-8", "surrogatepass")
        headers = {"Content-Type": kind}
        return self.runner.run(self.http.request(method, path, content=content, headers=headers))

    def watch(self, offer: str) -> httpx.Response:
        return self.send("POST", "/whep", offer, "application/sdp")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("POSTS_PER_S", "POST_BURST", "CONNECT_TIMEOUT_S", "CHANGES_PER_S", "CHANGE_BURST"):
        monkeypatch.setattr(peer_connections, name, 1e9)
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())

        async def start() -> tuple[InMemoryClient, FastAPI, Any]:
            client = InMemoryClient(Painter())
            config = Config(serve=ServeConfig(max_viewers=8, address_share=1.0))
            app = create_app(config)
            attached = attach_engine(app, config, client)
            await attached.__aenter__()
            return client, app, attached

        client, app, attached = runner.run(start())
        stack.callback(client.stop)
        stack.callback(lambda: runner.run(attached.__aexit__(None, None, None)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        server = Server(runner, app, httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1"), "")
        server.offer = runner.run(_offer("video"))
        runner.get_loop().set_exception_handler(lambda _, context: server.errors.append(context))
        yield server


@pytest.mark.parametrize("offers", OFFERS)
def test_no_offer_of_a_stranger_gives_a_5xx(server: Server, offers: int) -> None:
    assert server.watch(server.offer).status_code == 201
    answers: dict[int, int] = {}

    @settings(max_examples=offers)
    @given(damaged(server.offer))
    def never(offer: str) -> None:
        response = server.watch(offer)
        assert response.status_code < 500, response.text
        assert "cannot be answered" not in response.text, "what aiortc cannot answer is found before it is asked"
        answers[response.status_code] = answers.get(response.status_code, 0) + 1
        if response.status_code == 201:
            assert server.send("DELETE", response.headers["location"], "", "").status_code == 200

    never()
    assert answers[201] > offers / 50 and answers[400] > offers / 10, answers
    assert not server.errors


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_no_candidate_of_a_stranger_gives_a_5xx(server: Server, fragments: int) -> None:
    fragment = "\r\n".join(
        ["a=ice-pwd:0123456789012345678901", "m=video 9 UDP/TLS/RTP/SAVPF 0", "a=mid:0", LIST, "a=end-of-candidates"]
    )
    viewer, visits = "", 0
    answers: dict[int, int] = {}

    @settings(max_examples=fragments)
    @given(damaged(fragment))
    @example(LIST.replace("50001", "x"))
    @example(LIST.replace("50000", "\u00b2"))
    def never(text: str) -> None:
        nonlocal viewer, visits
        if visits % VISITS == 0:
            if viewer:
                server.send("DELETE", viewer, "", "")
            viewer = server.watch(server.offer).headers["location"]
        visits += 1
        response = server.send("PATCH", viewer, text, "application/trickle-ice-sdpfrag")
        assert response.status_code < 500, response.text
        answers[response.status_code] = answers.get(response.status_code, 0) + 1

    never()
    assert answers[204] > fragments / 10 and answers[400] > fragments / 80, answers
    assert not server.errors
