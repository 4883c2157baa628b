"""Viewers that stop, die, reload without end or send strange offers, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aioice.ice
import av
import httpx
import psutil
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.exceptions import OperationError

from streamdiff import clock
from streamdiff.config import Config, IceServer, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.server.media import encoder
from streamdiff.server.media.codecs import Codec, Format
from streamdiff.server.media.encoder import QUEUE_PACKETS
from streamdiff.server.problem import Problem
from streamdiff.server.webrtc import peer_connections, sender, viewers
from streamdiff.server.webrtc.ice import REST_S, IceServers
from tests.server.conftest import Peer, Site, bearer, in_slots, run_scene
from tests.server.webrtc.test_sdp import UNUSABLE, as_jsep

pytestmark = pytest.mark.slow

SDP = {"Content-Type": "application/sdp"}


async def _offer(*kinds: str) -> str:
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    for kind in kinds:
        pc.addTransceiver(kind, direction="recvonly")
    await pc.setLocalDescription(await pc.createOffer())
    text = str(pc.localDescription.sdp)
    await pc.close()
    return text


@asynccontextmanager
async def _viewer_process(site: Site, query: str = "") -> AsyncIterator[tuple[asyncio.subprocess.Process, list[int]]]:
    """A viewer in another process, and how many frames it has said to have decoded."""
    words = (sys.executable, "-m", "benchmarks.peers", f"{site.base}/whep{query}", "--decode")
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    frames = [0]

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            frames[0] = json.loads(line)[0]["frames"]

    reading = asyncio.create_task(read())
    try:
        await site.until(lambda: frames[0] > 0)
        yield process, frames
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


# ---- offers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "directions"),
    [
        (("audio", "video"), ["inactive", "sendonly"]),
        (("video", "video"), ["sendonly", "inactive"]),
    ],
)
@pytest.mark.parametrize("offered", ["recvonly", "sendrecv"])
def test_what_a_viewer_offers_beside_one_video_stays_inactive(
    kinds: tuple[str, ...], directions: list[str], offered: str
) -> None:
    async def scene(site: Site) -> None:
        offer = (await _offer(*kinds)).replace("a=recvonly", f"a={offered}")
        response = await site.http.post("/whep", content=offer, headers=SDP)
        assert response.status_code == 201, response.text
        found = re.findall(r"^a=(sendrecv|sendonly|recvonly|inactive)\r$", response.text, re.MULTILINE)
        assert found == directions

    run_scene(scene)


def _unreachable(offer: str) -> str:
    """The offer of a peer that has only found addresses that cannot be used, and no others will come."""
    return re.sub(r"a=candidate.*\r\n", "", offer).replace("a=end-of-candidates\r\n", UNUSABLE)


def _high(offer: str) -> str:
    """The offer of a peer that says it decodes H.264 of the high profile."""
    offer = re.sub(r"a=rtpmap:97 VP8.*\r\n", "", offer)
    return re.sub(r"profile-level-id=42....", "profile-level-id=640c1f", offer)


@pytest.mark.parametrize("rewritten", [_unreachable, as_jsep, lambda offer: "\ufeff" + offer, _high])
def test_offers_as_they_are_written_elsewhere_play(rewritten: Callable[[str], str]) -> None:
    async def scene(site: Site) -> None:
        peer = await site.offer()
        peer.pc.addTransceiver("audio", direction="recvonly")
        await peer.pc.setLocalDescription(await peer.pc.createOffer())
        offer = rewritten(peer.pc.localDescription.sdp) + "m=text 9 UDP/TLS/RTP/SAVPF 98\r\na=mid:text\r\n"
        response = await site.http.post("/whep", content=offer, headers=SDP)
        assert response.status_code == 201, response.text
        *answer, text = re.split(r"(?m)^(?=m=)", response.text)
        assert text.startswith("m=text 0 ") and not re.search(r"^m=\w+ 0 ", "".join(answer), re.MULTILINE)
        if rewritten is _high:
            assert "profile-level-id=640c1f" in response.text and "=42" not in response.text
        played = "".join(answer).replace("640c1f", "42e01f")  # aiortc reads no others
        await peer.pc.setRemoteDescription(RTCSessionDescription(played, "answer"))
        await peer.frame()

    run_scene(scene)


def test_bodies_that_are_compressed_are_refused() -> None:
    async def scene(site: Site) -> None:
        body = gzip.compress((await _offer("video")).encode())
        for path in ("/whep", "/whip"):
            response = await site.http.post(path, content=body, headers=SDP | {"Content-Encoding": "gzip"})
            assert (response.status_code, response.json()["code"]) == (415, "encoding")
            assert response.headers["accept-encoding"] == "identity"

    run_scene(scene)


def test_ports_are_not_blamed_where_no_socket_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioice.ice, "get_host_addresses", lambda use_ipv4, use_ipv6: ["192.0.2.1"])

    async def scene(site: Site) -> None:
        response = await site.http.post("/whep", content=await _offer("video"), headers=SDP)
        assert (response.status_code, response.json()["code"]) == (503, "network")
        assert site.state.viewers.count == 0

    run_scene(scene)


def test_what_aiortc_says_of_an_offer_is_not_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: object) -> None:
        raise OperationError("inner words")

    monkeypatch.setattr(RTCPeerConnection, "setRemoteDescription", refuses)

    async def scene(site: Site) -> None:
        response = await site.http.post("/whep", content=await _offer("video"), headers=SDP)
        assert (response.status_code, response.json()["code"]) == (422, "offer")
        assert "inner words" not in response.text

    run_scene(scene)


@pytest.mark.parametrize("scheme", ["stun", "turn"])
def test_an_ice_server_that_does_not_answer_is_left_out_for_a_minute(
    scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"{scheme}:127.0.0.1:{silent.getsockname()[1]}"
        secrets = {"username": "ann", "credential": "s3cret"} if scheme == "turn" else {}

        async def scene(site: Site) -> None:
            await asyncio.gather(site.watch(), site.watch())
            silent.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while silent.recv(2000):
                    pass
            peer = await site.watch()
            with pytest.raises(BlockingIOError):
                silent.recv(1)  # it is not asked
            assert url in (await site.http.options("/whep")).headers["link"], "viewers may reach it"
            assert f'ice_failures_total{{url="{url}"}} 1.0'.encode() in site.state.metrics.text()
            assert len([each for each in caplog.records if url in each.getMessage()]) == 1
            later_s = clock.monotonic_s() + REST_S
            monkeypatch.setattr(clock, "monotonic_s", lambda: later_s)
            assert [each.urls for each in site.state.ice_servers.to_ask()] == [url]
            monkeypatch.undo()
            await peer.frame()

        run_scene(scene, Config(serve=ServeConfig(ice_servers=[IceServer(url=url, **secrets)])))


def test_every_way_to_name_the_default_session_gives_one_place() -> None:
    async def scene(site: Site) -> None:
        offer = (await site.offer(control=False)).pc.localDescription.sdp
        for path in ("/whep", "/whep/default", "/whep?session=default"):
            response = await site.http.post(path, content=offer, headers=SDP)
            assert response.status_code == 201
            assert re.fullmatch(r"/whep/default/[\w-]{32}", response.headers["location"])
        viewer = response.headers["location"]
        other = viewer.replace("/default/", "/other/")
        assert (await site.http.delete(other)).status_code == 404, "a viewer belongs to its session"
        assert (await site.http.delete(viewer)).status_code == 200
        assert (await site.http.delete(other)).status_code == 404
        assert (await site.http.delete(viewer)).status_code == 200
        missing = await site.http.post("/whep/other", content=offer, headers=SDP)
        assert (missing.status_code, missing.json()["status"]) == (404, 404)

    run_scene(scene)


def test_ice_servers_are_sent_to_those_who_may_watch_and_none_unless_named(tmp_path: Path) -> None:
    for name, text in (
        ("password", "\ufeffs3cret\r\n"),
        ("two", "two words"),
        ("watch", "w" * 24),
        ("steer", "s" * 24),
    ):
        (tmp_path / name).write_text(text)
    turn = {"url": "turn:turn.example:3478?transport=udp", "username": "ann"}
    servers = [
        IceServer(url="stun:127.0.0.1:9"), IceServer(**turn, credential_file=str(tmp_path / "password")),
    ]  # fmt: skip
    wanted = (
        '<stun:127.0.0.1:9>; rel="ice-server", <turn:turn.example:3478?transport=udp>; rel="ice-server"; '
        'username="ann"; credential="s3cret"; credential-type="password"'
    )

    async def named(site: Site) -> None:
        assert "link" not in (await site.http.options("/whep")).headers
        answer = await site.http.options("/whep", headers=bearer("w" * 24))
        assert answer.headers["link"] == wanted
        assert answer.headers.get_list("link") == wanted.split(", "), "one header for each, as OBS reads them"

    async def unnamed(site: Site) -> None:
        response = await site.post(await site.offer(control=False))
        assert "link" not in response.headers
        assert "srflx" not in response.text, "nobody was asked for the public address"
        assert "access-control-allow-origin" not in response.headers

    tokens = {"view_token_file": str(tmp_path / "watch"), "control_token_file": str(tmp_path / "steer")}
    run_scene(named, Config(serve=ServeConfig(ice_servers=servers, **tokens)))
    run_scene(unnamed)
    in_place = IceServers([IceServer(**turn, credential="s3cret")])
    assert [each.credential for each in in_place.issue()] == ["s3cret"]
    with pytest.raises(ConfigError):
        IceServers([IceServer(**turn, credential_file=str(tmp_path / "two"))])


# ---- viewers that stop, vanish and flood -----------------------------------------------------------------------------


def test_a_viewer_that_stops_reading_holds_nobody_up_and_goes_on_later(regular_stamps: None) -> None:
    async def scene(site: Site) -> None:
        other = await site.watch()
        async with _viewer_process(site) as (process, frames):
            process.send_signal(signal.SIGSTOP)
            stamps = [(await other.frame()).pts for _ in range(80)]
            assert in_slots(stamps[20:], 2250)
            tracks = [viewer.sender for viewer in site.state.viewers._peers.values()]
            assert len(tracks) == 2 and all(track.waiting <= QUEUE_PACKETS for track in tracks)
            process.send_signal(signal.SIGCONT)
            seen = frames[0]
            await site.until(lambda: frames[0] > seen + 40)

    run_scene(scene)


def test_a_viewer_that_says_nothing_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "SILENT_S", 3.0)
    monkeypatch.setattr(viewers, "CHECK_S", 0.1)

    async def scene(site: Site) -> None:
        other = await site.watch()
        async with _viewer_process(site) as (process, _):
            assert site.state.viewers.count == 2
            process.send_signal(signal.SIGSTOP)
            await site.until(lambda: site.state.viewers.count == 1)
            assert b'viewers_ended_total{end="silent"} 1.0' in site.state.metrics.text()
            await other.frame()

    run_scene(scene)


def test_a_page_that_comes_back_takes_the_place_of_its_own_dead_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "STALE_S", 3.0)

    async def scene(site: Site) -> None:
        other = await site.watch()
        async with _viewer_process(site, "?client=tab-one-1") as (process, _):
            [_, viewer] = site.state.viewers._peers.values()
            again = await site.offer()
            refused = await site.post(again, client="tab-one-1")
            assert refused.status_code == 503, "it watches: whoever calls itself the same does not push it out"
            process.send_signal(signal.SIGSTOP)
            await site.until(lambda: viewer.sender.silent_s(clock.monotonic_s()) > 3.0)
            assert (await site.post(again, client="tab-two-2")).status_code == 503
            assert (await site.post(again)).status_code == 503
            assert (await site.post(again, client="tab-one-1")).status_code == 201
            assert site.state.viewers.count == 2
            assert b'viewers_ended_total{end="ghost"} 1.0' in site.state.metrics.text()
            await again.frame()
            await other.frame()

    run_scene(scene, Config(serve=ServeConfig(max_viewers=2, address_share=1.0)))


def test_a_dead_connection_at_another_address_makes_no_room_above_the_share_of_one_address() -> None:
    async def scene(site: Site) -> None:
        offer = (await site.offer()).pc.localDescription.sdp
        session = site.state.manager.get("default")

        async def create(address: str, client: str | None = None) -> str:
            """The refusal's code; "" where there is none."""
            try:
                await site.state.viewers.create(session, offer, address, None, client_id=client)
            except Problem as problem:
                return str(problem.code)
            return ""

        assert [await create("192.0.2.1") for _ in range(3)] == ["", "", "address"]
        assert await create("192.0.2.2", "tab-one-1") == ""
        assert await create("192.0.2.1", "tab-one-1") == "address", "that of the other is no room here"
        assert await create("192.0.2.2") == ""
        assert await create("192.0.2.1", "tab-one-1") == "viewers", "nor where all is full"
        assert await create("192.0.2.2", "tab-one-1") == "", "its own is"
        assert await create("192.0.2.3", "tab-one-1") == "", "so is another's where only the total is reached"
        assert site.state.viewers.count == 4

    run_scene(scene, Config(serve=ServeConfig(max_viewers=4, address_share=0.5)))


def test_what_a_client_may_call_itself() -> None:
    async def scene(site: Site) -> None:
        offer = await _offer("video")
        for client in ("", "short", "x" * 65, "tab one one", "tab-one-\u00e9"):
            response = await site.http.post("/whep", params={"client": client}, content=offer, headers=SDP)
            assert (response.status_code, response.json()["field"]) == (422, "client")
        assert site.state.viewers.count == 0

    run_scene(scene)


def test_candidates_and_ends_without_number_are_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "CHANGE_BURST", 3.0)
    monkeypatch.setattr(peer_connections, "CHANGES_PER_S", 0.001)

    async def scene(site: Site) -> None:
        peer = await site.watch()
        trickle = {"Content-Type": "application/trickle-ice-sdpfrag"}
        answers = [await site.http.delete("/whep/default/nobody") for _ in range(4)]
        answers.append(await site.http.patch(peer.location, content="a=end-of-candidates", headers=trickle))
        assert [each.status_code for each in answers] == [404, 404, 404, 429, 429]
        assert answers[-1].headers["retry-after"] == "1"
        await peer.frame()

    run_scene(scene)


def test_a_viewer_whose_packets_do_not_get_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "STUCK_S", 0.5)
    monkeypatch.setattr(viewers, "CHECK_S", 0.1)

    async def scene(site: Site) -> None:
        stays, stuck = await site.watch(), await site.watch()
        await asyncio.gather(stays.frame(), stuck.frame())
        viewer = list(site.state.viewers._peers.values())[1]
        [sender] = viewer.sender.pc.getSenders()

        cable = asyncio.Event()

        async def never(data: bytes) -> None:
            await cable.wait()

        monkeypatch.setattr(sender.transport, "_send_rtp", never)
        await site.until(lambda: site.state.viewers.count == 1)
        assert (await site.http.delete(stuck.location)).status_code == 200, "its end is not waited for"
        cable.set()
        assert b'viewers_ended_total{end="stuck"} 1.0' in site.state.metrics.text()
        assert len(viewer.sender._queue) <= QUEUE_PACKETS
        for _ in range(40):
            await stays.frame()

    run_scene(scene)


def test_a_viewer_whose_codec_cannot_be_encoded_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(codec: Codec, fmt: Format) -> av.VideoCodecContext:
        raise av.FFmpegError(12, "Cannot allocate memory")

    monkeypatch.setattr(encoder, "open_context", fails)
    monkeypatch.setattr(sender, "STUCK_S", 1.0)

    async def scene(site: Site) -> None:
        peer = await site.watch()
        await site.until(lambda: b'viewers_ended_total{end="encoder"} 1.0' in site.state.metrics.text())
        await site.until(lambda: peer.pc.connectionState == "closed")

    run_scene(scene)


def test_a_killed_viewer_is_noticed_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioice.ice, "CONSENT_INTERVAL", 0.3)

    async def scene(site: Site) -> None:
        async with _viewer_process(site) as (process, _):
            fanout = site.state.manager.get("default").playback.fanout  # type: ignore[union-attr]
            assert fanout.codecs == ("h264",)
            process.kill()
            await site.until(lambda: site.state.viewers.count == 0)
            assert fanout.codecs == (), "nobody watches, nothing is encoded"
            assert re.search(rb'viewers_ended_total{end="(failed|closed)"} 1.0', site.state.metrics.text())

    run_scene(scene)


# ---- what is left ----------------------------------------------------------------------------------------------------


def _held() -> tuple[int, int]:
    """Tasks and open files."""
    gc.collect()
    return len(asyncio.all_tasks()), psutil.Process().num_fds()


async def _reload(site: Site) -> None:
    peer: Peer = await site.watch()
    await peer.frame()
    await site.http.delete(peer.location)
    await peer.pc.close()
    site.peers.remove(peer)


def test_a_page_that_is_reloaded_without_end_leaves_nothing_behind() -> None:
    async def scene(site: Site) -> None:
        for _ in range(3):
            await _reload(site)
        tasks, files = _held()
        memory = psutil.Process().memory_info().rss
        for _ in range(30):
            await _reload(site)
        await site.until(lambda: _held()[0] <= tasks and _held()[1] <= files)
        assert psutil.Process().memory_info().rss - memory < 30 * 2**20, "less than 1 MB a visit: nothing is kept"
        assert site.state.viewers.count == 0
        late = await site.watch()
        for _ in range(20):
            await late.frame()

    run_scene(scene)


def test_a_connection_that_never_lived_makes_room_for_the_next_of_its_client_and_the_oldest_goes_first() -> None:
    async def scene(site: Site) -> None:
        offer = (await site.offer()).pc.localDescription.sdp

        async def post(client: str) -> httpx.Response:
            return await site.http.post("/whep", params={"client": client}, content=offer, headers=SDP)

        first, second = await post("tab-one-1"), await post("tab-one-1")
        assert [first.status_code, second.status_code] == [201, 201], "there is room: both stay"
        assert (await post("tab-two-2")).status_code == 503
        third = await post("tab-one-1")
        assert third.status_code == 201
        ids = [each.headers["location"].rsplit("/", 1)[1] for each in (second, third)]
        assert list(site.state.viewers._peers) == ids
        assert (await site.http.delete(first.headers["location"])).status_code == 200, "it is remembered for a while"
        crowd = await asyncio.gather(*(post("tab-one-1") for _ in range(20)))
        assert {each.status_code for each in crowd} <= {201, 503}
        assert site.state.viewers.count == 2

    run_scene(scene, Config(serve=ServeConfig(max_viewers=2, address_share=1.0)))
