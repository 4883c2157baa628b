"""A live session published over WHIP, against a media server made of aiortc."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import uvicorn
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from streamdiff.config import Config, ServeConfig
from streamdiff.server.outputs import output
from tests.server.conftest import Site, open_site
from tests.server.scripted import COLOURS, SIZE

pytestmark = pytest.mark.slow

TOKEN, ROOM = "token/of this+test", "room-that-nobody-else-knows"


@dataclass(eq=False)
class MediaServer:
    """Takes one publication at a time. `refusal`: what it answers instead, while it has one."""

    port: int = 0
    pc: RTCPeerConnection | None = None
    track: Any = None
    refusal: Response | None = None
    redirected: bool = False
    elsewhere = "127.0.0.1"
    host: str = ""
    """Where the publication is said to be; "": where it was asked for."""
    heard: list[tuple[str, str, str]] = field(default_factory=list)
    seen: Callable[[str], str] = str
    """What it sees of an offer."""

    async def post(self, request: Request) -> Response:
        self.heard.append(("POST", request.headers.get("authorization", ""), request.headers["content-type"]))
        assert request.headers["accept-encoding"] == "identity", "what is unpacked has no limit"
        if self.refusal is not None:
            return self.refusal
        if not self.redirected:
            self.redirected = True
            return Response(status_code=307, headers={"Location": f"http://{self.elsewhere}:{self.port}/ingest"})
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.pc.on("track", lambda track: setattr(self, "track", track))
        await self.pc.setRemoteDescription(RTCSessionDescription(self.seen((await request.body()).decode()), "offer"))
        await self.pc.setLocalDescription(await self.pc.createAnswer())
        headers = {"Location": f"http://{self.host}:{self.port}/publications/1" if self.host else "/publications/1"}
        return Response(self.pc.localDescription.sdp, 201, headers, media_type="application/sdp")

    async def delete(self, request: Request) -> Response:
        self.heard.append(("DELETE", request.headers.get("authorization", ""), ""))
        return Response(status_code=200)

    async def frame(self) -> np.ndarray:
        """The next picture that comes in: uint8 `[H, W, 3]`."""
        async with asyncio.timeout(240):
            return np.asarray((await self.track.recv()).to_ndarray(format="rgb24"))


@contextlib.asynccontextmanager
async def media_server() -> AsyncIterator[MediaServer]:
    taking = MediaServer()
    app = FastAPI()
    app.add_api_route(f"/whip/{ROOM}", taking.post, methods=["POST"])
    app.add_api_route("/ingest", taking.post, methods=["POST"])
    app.add_api_route("/publications/1", taking.delete, methods=["DELETE"])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    taking.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield taking
    finally:
        if taking.pc is not None:
            await taking.pc.close()
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def published(host: str = "", listed: str = "") -> AsyncIterator[tuple[Site, MediaServer]]:
    """A server that publishes its session to a media server."""
    async with media_server() as taking:
        taking.host = host
        url = f"whip+http://token%2Fof%20this%2Btest@127.0.0.1:{taking.port}/whip/{ROOM}"
        targets = [f"whip+http://{listed}:{taking.port}/"] if listed else []
        async with open_site(Config(serve=ServeConfig(outputs=[url], output_targets=targets))) as site:
            yield site, taking


async def _key_frames(site: Site) -> float:
    name = 'streamdiff_key_frames_total{codec="h264"}'
    return float((await site.http.get("/metrics")).text.split(name)[1].split()[0])


def _sent(site: Site) -> output.OutputStatus:
    return site.state.outputs.configured[0].status


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What broke off is tried again at once."""
    monkeypatch.setattr(output, "BACK_OFF_S", (0.2,))


async def test_a_session_is_published_and_comes_back_when_the_media_server_does(soon: None) -> None:
    async with published() as (site, taking):
        for restarts in range(2):
            await site.until(lambda: taking.track is not None)
            for _ in range(30):
                picture = await taking.frame()
            assert picture.shape == (SIZE, SIZE, 3)
            assert np.abs(picture[40, 40].astype(int) - COLOURS["red"]).max() < 30
            await site.until(lambda: _sent(site).state == "sending" and _sent(site).frames >= 30)
            assert _sent(site).restarts == restarts
            if restarts == 0:
                assert taking.pc is not None
                taking.track = None
                await taking.pc.close()
        assert site.state.viewers.count == 0
        told = str((await site.http.get("/api/state")).json()) + (await site.http.get("/metrics")).text
        assert "whip+http://127.0.0.1" in told
        assert ROOM not in told
        assert "token" not in told
    bearer = f"Bearer {TOKEN}"
    post, delete = ("POST", bearer, "application/sdp"), ("DELETE", bearer, "")
    assert taking.heard == [post, post, delete, post, delete]  # the first is sent on to another address


@pytest.mark.parametrize("listed", ["", "localhost"])
async def test_another_server_that_the_media_server_names_is_asked_if_it_is_listed_and_without_the_token(
    listed: str,
) -> None:
    async with published("localhost", listed) as (site, taking):
        await site.until(lambda: _sent(site).state == "sending")
    deleted = [each for each in taking.heard if each[0] == "DELETE"]
    assert deleted == ([("DELETE", "", "")] if listed else [])


@pytest.mark.parametrize("listed", ["", "localhost"])
async def test_a_redirect_to_another_server_is_followed_if_that_is_listed(
    listed: str, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaServer, "elsewhere", "localhost")
    async with published(listed=listed) as (site, taking):
        await site.until(lambda: _sent(site).state == "sending" if listed else "redirects" in _sent(site).reason)
    posts = [token for method, token, _ in taking.heard if method == "POST"]
    assert (posts == [f"Bearer {TOKEN}", ""]) if listed else set(posts) == {f"Bearer {TOKEN}"}


async def _endless(piece: bytes, pause_s: float) -> AsyncIterator[bytes]:
    while True:
        yield piece
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize(("piece", "pause_s", "reason"), [(b"v" * 100_000, 0.0, "256 KiB"), (b"v", 0.05, "no whole")])
async def test_an_answer_without_an_end_is_given_up(
    piece: bytes, pause_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WHIP_CONNECT_S", 60.0 if "KiB" in reason else 1.0)
    async with published() as (site, taking):
        taking.refusal = StreamingResponse(_endless(piece, pause_s), 201)
        await site.until(lambda: reason in _sent(site).reason)


async def test_a_lost_picture_is_made_good_by_a_key_frame() -> None:
    async with published() as (site, taking):
        await site.until(lambda: taking.track is not None)
        await taking.frame()
        assert taking.pc is not None
        [receiver] = taking.pc.getReceivers()
        before = await _key_frames(site)
        await receiver._send_rtcp_pli(next(iter(receiver._RTCRtpReceiver__remote_streams)))
        for _ in range(120):  # long before the next one that comes by itself
            await taking.frame()
        assert await _key_frames(site) > before


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Response(status_code=403), "the media server answered 403 Forbidden"),
        (Response("no sdp", 201, {"Location": "/publications/1"}), "the media server's answer cannot be used"),
        (Response("v=0", 201, {"Location": "http://[x"}), "the media server's answer names an address that is none"),
    ],
    ids=["forbidden", "nonsense", "no address"],
)
async def test_what_the_media_server_makes_impossible_is_told(refusal: Response, reason: str, soon: None) -> None:
    async with published() as (site, taking):
        taking.refusal = refusal
        await site.until(lambda: _sent(site).reason.startswith(reason))
        taking.refusal = None
        await site.until(lambda: taking.track is not None)
        await taking.frame()


async def test_nobody_there_is_told() -> None:
    async with open_site(Config(serve=ServeConfig(outputs=["whip+http://127.0.0.1:9/x"]))) as site:
        await site.until(lambda: "cannot be reached (ConnectError)" in _sent(site).reason)
