"""WHEP against a running server: statuses for every bad offer, and real aiortc viewers that see the stream."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

import httpx
import numpy as np
import psutil
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.server.media.encoder import EncoderThread
from streamdiff.server.webrtc import peer_connections
from tests.server.conftest import Peer, Site, open_site
from tests.server.scripted import COLOURS, SIZE

pytestmark = pytest.mark.slow

SDP = {"Content-Type": "application/sdp"}


def _colour(frame: object) -> tuple[int, ...]:
    matrix = "ITU709" if frame.colorspace == 1 else "ITU601"  # type: ignore[attr-defined]
    return tuple(int(c) for c in frame.to_ndarray(format="rgb24", src_colorspace=matrix)[40, 40])  # type: ignore[attr-defined]


def _is(colour: tuple[int, ...], name: str) -> bool:
    return bool(np.abs(np.subtract(colour, COLOURS[name])).max() < 24)


async def _until_colour(peer: Peer, name: str) -> None:
    for _ in range(400):
        if _is(_colour(await peer.frame()), name):
            return
    raise AssertionError(f"{name} never came")


# ---- the surface -----------------------------------------------------------------------------------------------------


async def test_bad_offers_are_answered_and_the_stream_goes_on() -> None:
    async with open_site() as site:
        watcher = await site.watch()
        await watcher.frame()
        good = (await site.offer()).pc.localDescription.sdp
        no_common = re.sub(r"a=(rtpmap|fmtp):.*\r\n", "", good).replace(
            "a=mid:0\r\n", "a=mid:0\r\na=rtpmap:97 AV1/90000\r\n"
        )
        table: list[tuple[bytes | str, dict[str, str], int]] = [
            (good, {"Content-Type": "text/plain"}, 415),
            ("", SDP, 400),
            (b"v=0\r\n\xff\xfe", SDP, 400),
            (good.replace("a=fingerprint", "a=x-print"), SDP, 400),
            (good + "a=x\r\n" * 100_000, SDP, 413),
            (good.replace("a=recvonly", "a=sendonly"), SDP, 422),
            (no_common, SDP, 422),
        ]
        for body, headers, status in table:
            response = await site.http.post("/whep", content=body, headers=headers)
            assert response.status_code == status, (status, response.text, str(body)[:200])
            assert response.headers["content-type"] == "application/problem+json"
            assert len(response.json()["detail"]) > 10
        assert site.state.viewers.count == 1
        for _ in range(20):
            await watcher.frame()


async def test_a_body_without_a_length_is_read_up_to_the_limit_only() -> None:
    async with open_site() as site:
        sent = 0

        async def endless() -> object:
            nonlocal sent
            for _ in range(10_000):
                sent += 16_384
                yield b"a" * 16_384

        try:
            response = await site.http.post("/whep", content=endless(), headers=SDP)
            assert response.status_code == 413
        except httpx.TransportError:
            pass  # the server closes; whether its answer is read first is luck
        assert sent < 64 * 2**20


async def test_sessions_end_once_and_are_remembered_for_a_while() -> None:
    async with open_site() as site:
        peer = await site.watch()
        assert re.fullmatch(r"/whep/default/[\w-]{32}", peer.location)
        await peer.frame()
        for method in ("OPTIONS", "GET", "HEAD"):
            described = await site.http.request(method, peer.location)
            assert described.status_code == 200
            assert described.headers["accept-patch"] == "application/trickle-ice-sdpfrag"
        assert (await site.http.delete(peer.location)).status_code == 200
        assert site.state.viewers.count == 0
        assert (await site.http.delete(peer.location)).status_code == 200
        assert (await site.http.delete("/whep/default/unknown")).status_code == 404
        for method in ("OPTIONS", "GET", "HEAD"):
            for gone in (peer.location, "/whep/default/unknown", peer.location.replace("default", "other")):
                assert (await site.http.request(method, gone)).status_code == 404
        trickle = {"Content-Type": "application/trickle-ice-sdpfrag"}
        assert (await site.http.patch(peer.location, content="a=mid:0", headers=trickle)).status_code == 404


async def test_trickle_takes_candidates_and_refuses_what_it_cannot() -> None:
    async with open_site() as site:
        peer = await site.watch()
        username = re.search(r"a=ice-ufrag:(\S+)", peer.pc.localDescription.sdp).group(1)  # type: ignore[union-attr]
        good = f"a=ice-ufrag:{username}\r\na=mid:0\r\na=candidate:1 1 udp 1 192.0.2.77 5000 typ host\r\n"
        trickle = {"Content-Type": "application/trickle-ice-sdpfrag"}
        for body, status in [
            (good, 204),
            (good.replace("192.0.2.77", "someone.local") + "a=end-of-candidates\r\n", 204),
            (good + "a=candidate:1 1 udp 1 192.0.2.78 99999 typ host\r\n", 204),
            ("a=candidate:1 1 udp 1 192.0.2.78 99999 typ host\r\n", 400),
            ("candidate:1 1 udp 1 192.0.2.78 5000 typ host\r\n", 204),
            ("", 400),
            ("hello", 400),
            (good.replace(username, "other"), 422),
        ]:
            assert (await site.http.patch(peer.location, content=body, headers=trickle)).status_code == status, body
        wrong = await site.http.patch(peer.location, content=good, headers=SDP)
        assert (wrong.status_code, wrong.headers["accept-patch"]) == (415, "application/trickle-ice-sdpfrag")
        await peer.frame()
        [viewer] = site.state.viewers._peers.values()
        [transport] = {each.transport.transport for each in viewer.sender.pc.getSenders()}
        assert {"192.0.2.77", "192.0.2.78"} <= {each.ip for each in transport.getRemoteCandidates()}


# ---- limits ----------------------------------------------------------------------------------------------------------


async def test_a_hundred_at_once_get_exactly_the_places_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "CONNECT_TIMEOUT_S", 600.0)

    async with open_site(Config(serve=ServeConfig(max_viewers=8, address_share=1.0))) as site:
        watcher = await site.watch()
        await watcher.frame()
        offer = (await site.offer()).pc.localDescription.sdp

        async def come_and_go() -> None:
            # Without connections that are kept: on a busy machine the server closes them before they are used again.
            posts = [site.http.post("/whep", content=offer, headers=SDP | {"Connection": "close"}) for _ in range(100)]
            responses = await asyncio.gather(*posts)
            statuses = [response.status_code for response in responses]
            assert statuses.count(201) == 7, "eight places, one taken"
            assert statuses.count(503) == 93
            assert all("retry-after" in each.headers for each in responses if each.status_code == 503)
            assert site.state.viewers.count == 8
            places = [each.headers["location"] for each in responses if each.status_code == 201]
            await asyncio.gather(*(site.http.delete(place) for place in places))
            assert site.state.viewers.count == 1

        await come_and_go()
        tasks, files = len(asyncio.all_tasks()), psutil.Process().num_fds()
        await come_and_go()
        await site.until(lambda: len(asyncio.all_tasks()) <= tasks and psutil.Process().num_fds() <= files + 2)
        for _ in range(20):
            await watcher.frame()


async def test_who_never_connects_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "CONNECT_TIMEOUT_S", 0.5)

    async with open_site() as site:
        offer = (await site.offer()).pc.localDescription.sdp
        location = (await site.http.post("/whep", content=offer, headers=SDP)).headers["location"]
        await site.until(lambda: site.state.viewers.count == 0)
        assert (await site.http.delete(location)).status_code == 200


async def test_a_flood_from_one_address_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "POST_BURST", 3.0)
    monkeypatch.setattr(peer_connections, "POSTS_PER_S", 0.001)

    async with open_site() as site:
        offer = (await site.offer()).pc.localDescription.sdp
        responses = [await site.http.post("/whep", content=offer, headers=SDP) for _ in range(5)]
        assert [response.status_code for response in responses] == [201, 201, 201, 429, 429]
        assert responses[-1].headers["retry-after"] == "1"


# ---- viewers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "name"), [("h264", "H264"), ("vp8", "VP8"), (None, "H264")])
async def test_a_viewer_sees_the_stream(codec: str | None, name: str) -> None:
    async with open_site() as site:
        peer = await site.watch(codec)
        video = peer.answer[peer.answer.index("m=video") :]
        assert f" {name}/90000" in video
        assert "a=sendonly" in video
        assert "a=setup:passive" in video
        frames = [await peer.frame() for _ in range(60)]
        assert (frames[0].width, frames[0].height) == (SIZE, SIZE)
        assert _is(_colour(frames[0]), "red")
        stamps = [frame.pts for frame in frames]
        assert all(after > before for before, after in pairwise(stamps))
        assert set(np.diff(stamps)) & {2250}, "40 frames per second on the 90 kHz clock"
        assert str(frames[0].time_base) == "1/90000"


def _figure(site: Site, name: str) -> float:
    """A figure of the H.264 encoders."""
    return float(site.state.metrics.text().decode().split(f'streamdiff_{name}{{codec="h264"}}')[1].split()[0])


async def test_two_viewers_share_one_encoder_and_the_second_gets_a_key_frame() -> None:
    async with open_site() as site:
        first = await site.watch()
        await first.frame()
        fanout = site.live.playback
        before = _figure(site, "key_frames_total")
        second = await site.watch()
        await second.frame()
        assert fanout.codecs == ("h264",)
        assert _figure(site, "key_frames_total") > before
        [_, viewer] = site.state.viewers._peers.values()
        with pytest.MonkeyPatch.context() as patched:
            asked: list[EncoderThread] = []
            patched.setattr(EncoderThread, "request_key", lambda encoder: asked.append(encoder))
            fanout.attach("h264", viewer.sender.put)
        assert asked, "as it joins, and not with the first picture that it cannot use"
        pictures = _figure(site, "encode_seconds_count")
        for _ in range(20):
            await asyncio.gather(first.frame(), second.frame())
        third = await site.watch("vp8")
        await third.frame()
        assert set(fanout.codecs) == {"h264", "vp8"}
        assert _figure(site, "encode_seconds_count") > pictures
        await asyncio.gather(*(site.http.delete(peer.location) for peer in (first, second, third)))
        assert fanout.codecs == ()


async def test_who_joins_a_paused_stream_sees_the_picture() -> None:
    async with open_site() as site:
        first = await site.watch()
        await first.frame()
        await site.http.post("/api/control", json={"type": "pause"})
        late = await site.watch()
        assert _is(_colour(await late.frame()), "red")
        live = site.live
        frame = live.stats()["frame"]
        await late.frame()
        await late.frame()
        assert live.stats()["frame"] == frame, "stills keep the connection alive; the stream stands"
        await site.http.post("/api/control", json={"type": "resume"})
        await site.until(lambda: live.stats()["frame"] > frame)
        await _until_colour(late, "red")


async def test_a_lost_picture_is_sent_as_a_key_frame_and_who_asks_without_end_is_heard_now_and_then() -> None:
    async with open_site() as site:
        peer = await site.watch()
        await peer.frame()
        before = _figure(site, "key_frames_total")
        [receiver] = [each.receiver for each in peer.pc.getTransceivers() if each.kind == "video"]
        ssrc = int(re.search(r"a=ssrc:(\d+)", peer.answer).group(1))  # type: ignore[union-attr]
        for _ in range(100):
            await receiver._send_rtcp_pli(ssrc)
        await site.until(lambda: _figure(site, "key_frames_total") > before)
        await site.until(lambda: b"key_wishes_refused_total 9" in site.state.metrics.text())
        assert _figure(site, "key_frames_total") <= before + 6
        await peer.frame()
