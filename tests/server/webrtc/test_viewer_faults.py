"""Viewers that stop, die, reload without end or send strange offers, and what is left of them: nothing. Media on UDP
ports of a range."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import gzip
import hmac
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import aioice.ice
import av
import httpx
import pytest
from aiortc import RTCPeerConnection, RTCSessionDescription
from aiortc.exceptions import OperationError

from streamdiff import clock
from streamdiff.config import Config, IceServer, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.server.media import encoder
from streamdiff.server.media.encoder import QUEUE_PACKETS, Codec, Format
from streamdiff.server.webrtc import peer_connections, sender
from streamdiff.server.webrtc.ice import REST_S, IceServers, UdpPortLoop
from tests.server.conftest import Site, bearer, in_slots, open_site
from tests.server.test_restart import serving, watching
from tests.server.webrtc.test_sdp import UNUSABLE, _offer, as_jsep

pytestmark = pytest.mark.slow

SDP = {"Content-Type": "application/sdp"}


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


def _unreachable(offer: str) -> str:
    """The offer of a peer that has only found addresses that cannot be used, and no others will come."""
    return re.sub(r"a=candidate.*\r\n", "", offer).replace("a=end-of-candidates\r\n", UNUSABLE)


def _high(offer: str) -> str:
    """The offer of a peer that says it decodes H.264 of the high profile."""
    offer = re.sub(r"a=rtpmap:97 VP8.*\r\n", "", offer)
    return re.sub(r"profile-level-id=42....", "profile-level-id=640c1f", offer)


@pytest.mark.parametrize("rewritten", [_unreachable, as_jsep, lambda offer: "\ufeff" + offer, _high])
async def test_offers_as_they_are_written_elsewhere_play(rewritten: Callable[[str], str]) -> None:
    async with open_site() as site:
        peer = await site.offer()
        peer.pc.addTransceiver("audio", direction="recvonly")
        await peer.pc.setLocalDescription(await peer.pc.createOffer())
        offer = rewritten(peer.pc.localDescription.sdp) + "m=text 9 UDP/TLS/RTP/SAVPF 98\r\na=mid:text\r\n"
        response = await site.http.post("/whep", content=offer, headers=SDP)
        assert response.status_code == 201, response.text
        *answer, text = re.split(r"(?m)^(?=m=)", response.text)
        assert text.startswith("m=text 0 ") and not re.search(r"^m=\w+ 0 ", "".join(answer), re.MULTILINE)
        directions = re.findall(r"^a=(sendrecv|sendonly|recvonly|inactive)\r$", "".join(answer), re.MULTILINE)
        assert directions == ["sendonly", "inactive"], "sound is turned down"
        if rewritten is _high:
            assert "profile-level-id=640c1f" in response.text and "=42" not in response.text
        played = "".join(answer).replace("640c1f", "42e01f")  # aiortc reads no others
        await peer.pc.setRemoteDescription(RTCSessionDescription(played, "answer"))
        await peer.frame()


async def test_bodies_that_are_compressed_are_refused() -> None:
    async with open_site() as site:
        body = gzip.compress((await _offer("video")).encode())
        for path in ("/whep", "/whip"):
            response = await site.http.post(path, content=body, headers=SDP | {"Content-Encoding": "gzip"})
            assert (response.status_code, response.json()["code"]) == (415, "encoding")
            assert response.headers["accept-encoding"] == "identity"


async def test_what_aiortc_says_of_an_offer_is_not_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: object) -> None:
        raise OperationError("inner words")

    monkeypatch.setattr(RTCPeerConnection, "setRemoteDescription", refuses)

    async with open_site() as site:
        response = await site.http.post("/whep", content=await _offer("video"), headers=SDP)
        assert (response.status_code, response.json()["code"]) == (422, "offer")
        assert "inner words" not in response.text


@pytest.mark.parametrize("scheme", ["stun", "turn"])
async def test_an_ice_server_that_does_not_answer_is_left_out_for_a_minute(
    scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"{scheme}:127.0.0.1:{silent.getsockname()[1]}"
        secrets = {"username": "ann", "credential": "s3cret"} if scheme == "turn" else {}

        config = Config(serve=ServeConfig(ice_servers=[IceServer(url=url, **secrets)]))
        async with open_site(config) as site:
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


async def test_ice_servers_are_sent_to_those_who_may_watch_and_none_unless_named(tmp_path: Path) -> None:
    secrets = {"password": "\ufeffs3cret\r\n", "two": "two words", "watch": "w" * 24, "steer": "s" * 24}
    for name, text in secrets.items():
        (tmp_path / name).write_text(text)
    turn = {"url": "turn:turn.example:3478?transport=udp", "username": "ann"}
    servers = [
        IceServer(url="stun:127.0.0.1:9"), IceServer(**turn, credential_file=str(tmp_path / "password")),
    ]  # fmt: skip
    wanted = (
        '<stun:127.0.0.1:9>; rel="ice-server", <turn:turn.example:3478?transport=udp>; rel="ice-server"; '
        'username="ann"; credential="s3cret"; credential-type="password"'
    )

    tokens = {"view_token_file": str(tmp_path / "watch"), "control_token_file": str(tmp_path / "steer")}
    async with open_site(Config(serve=ServeConfig(ice_servers=servers, **tokens))) as site:
        assert "link" not in (await site.http.options("/whep")).headers
        answer = await site.http.options("/whep", headers=bearer("w" * 24))
        assert answer.headers["link"] == wanted
        assert answer.headers.get_list("link") == wanted.split(", "), "one header for each, as OBS reads them"

    async with open_site() as site:
        response = await site.post(await site.offer(control=False))
        assert "link" not in response.headers
        assert "srflx" not in response.text, "nobody was asked for the public address"
        assert "access-control-allow-origin" not in response.headers

    in_place = IceServers([IceServer(**turn, credential="s3cret")])
    assert [each.credential for each in in_place.issue()] == ["s3cret"]
    with pytest.raises(ConfigError):
        IceServers([IceServer(**turn, credential_file=str(tmp_path / "two"))])


def test_credentials_of_a_shared_secret_are_signed_and_good_for_an_hour_from_when_they_are_issued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As coturn reads them with `use-auth-secret`: `expires:name`, and the HMAC of that under the secret."""
    (tmp_path / "secret").write_text("north-wind\n")
    servers = IceServers([IceServer(url="turn:turn.example:3478", secret_file=str(tmp_path / "secret"))])
    for now_s in (1000.0, 9000.0):
        monkeypatch.setattr(clock, "wall_s", lambda now_s=now_s: now_s)
        [one], [other] = servers.issue(), servers.issue()
        assert one.username is not None and one.username != other.username, "each viewer has its own"
        assert int(one.username.partition(":")[0]) == now_s + 3600
        signed = hmac.digest(b"north-wind", one.username.encode(), "sha1")
        assert one.credential == base64.b64encode(signed).decode()


# ---- viewers that stop, vanish and flood -----------------------------------------------------------------------------


async def test_a_viewer_that_stops_reading_holds_nobody_up_and_goes_on_later(regular_stamps: None) -> None:
    async with open_site() as site:
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


async def test_a_viewer_that_says_nothing_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "SILENT_S", 3.0)
    monkeypatch.setattr(peer_connections, "CHECK_S", 0.1)

    async with open_site() as site:
        other = await site.watch()
        async with _viewer_process(site) as (process, _):
            assert site.state.viewers.count == 2
            process.send_signal(signal.SIGSTOP)
            await site.until(lambda: site.state.viewers.count == 1)
            assert b'viewers_ended_total{end="silent"} 1.0' in site.state.metrics.text()
            await other.frame()


async def test_a_page_that_comes_back_takes_the_place_of_its_own_dead_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connections, "STALE_S", 3.0)

    async with open_site(Config(serve=ServeConfig(max_viewers=2, address_share=1.0))) as site:
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


async def test_candidates_and_ends_without_number_are_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "CHANGE_BURST", 3.0)
    monkeypatch.setattr(peer_connections, "CHANGES_PER_S", 0.001)

    async with open_site() as site:
        peer = await site.watch()
        trickle = {"Content-Type": "application/trickle-ice-sdpfrag"}
        answers = [await site.http.delete("/whep/default/nobody") for _ in range(4)]
        answers.append(await site.http.patch(peer.location, content="a=end-of-candidates", headers=trickle))
        assert [each.status_code for each in answers] == [404, 404, 404, 429, 429]
        assert answers[-1].headers["retry-after"] == "1"
        await peer.frame()


async def test_a_viewer_whose_packets_do_not_get_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "STUCK_S", 0.5)
    monkeypatch.setattr(peer_connections, "CHECK_S", 0.1)

    async with open_site() as site:
        stays, stuck = await site.watch(), await site.watch()
        await asyncio.gather(stays.frame(), stuck.frame())
        viewer = list(site.state.viewers._peers.values())[1]
        [rtp] = viewer.sender.pc.getSenders()
        cable = asyncio.Event()

        async def never(data: bytes) -> None:
            await cable.wait()

        monkeypatch.setattr(rtp.transport, "_send_rtp", never)
        await site.until(lambda: site.state.viewers.count == 1)
        assert (await site.http.delete(stuck.location)).status_code == 200, "its end is not waited for"
        cable.set()
        assert b'viewers_ended_total{end="stuck"} 1.0' in site.state.metrics.text()
        assert len(viewer.sender._queue) <= QUEUE_PACKETS
        for _ in range(40):
            await stays.frame()


async def test_a_viewer_whose_codec_cannot_be_encoded_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(codec: Codec, fmt: Format) -> av.VideoCodecContext:
        raise av.FFmpegError(12, "Cannot allocate memory")

    monkeypatch.setattr(encoder, "open_context", fails)
    monkeypatch.setattr(sender, "STUCK_S", 1.0)

    async with open_site() as site:
        peer = await site.watch()
        await site.until(lambda: b'viewers_ended_total{end="encoder"} 1.0' in site.state.metrics.text())
        await site.until(lambda: peer.pc.connectionState == "closed")


async def test_a_killed_viewer_is_noticed_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioice.ice, "CONSENT_INTERVAL", 0.3)

    async with open_site() as site, _viewer_process(site) as (process, _):
        fanout = site.live.playback
        assert fanout.codecs == ("h264",)
        process.kill()
        await site.until(lambda: site.state.viewers.count == 0)
        assert fanout.codecs == (), "nobody watches, nothing is encoded"
        assert re.search(rb'viewers_ended_total{end="(failed|closed)"} 1.0', site.state.metrics.text())


async def test_a_connection_that_never_lived_makes_room_for_the_next_of_its_client_and_the_oldest_goes_first() -> None:
    async with open_site(Config(serve=ServeConfig(max_viewers=2, address_share=1.0))) as site:
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
        for odd in ("tab-one", "t" * 65, "tab-one-1!"):
            refused = await post(odd)
            assert (refused.status_code, refused.json()["code"]) == (422, "client"), odd
        crowd = await asyncio.gather(*(post("tab-one-1") for _ in range(20)))
        assert {each.status_code for each in crowd} <= {201, 503}
        assert site.state.viewers.count == 2


def free_range(count: int) -> range:
    """So many UDP ports side by side, below those that the system gives away, free a moment ago."""
    for low in range(20_000, 30_000, count):
        with contextlib.suppress(OSError), taken(range(low, low + count)):
            return range(low, low + count)
    raise AssertionError("no free ports")


@contextlib.contextmanager
def taken(ports: range) -> Iterator[None]:
    """Meanwhile somebody else has these ports, at all addresses."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).bind(("0.0.0.0", port))
            if socket.has_ipv6:
                other = stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                other.bind(("::", port))
        yield


def ports_of(sdp: str) -> list[int]:
    return [int(port) for port in re.findall(r"^a=candidate:\S+ 1 udp \d+ \S+ (\d+) typ host", sdp, re.MULTILINE)]


@pytest.mark.usefixtures("forked")
async def test_media_comes_from_ports_of_the_range() -> None:
    ports = free_range(8)
    async with serving("--udp-ports", f"{ports[0]}-{ports[-1]}") as (_, http), watching(http) as viewer:
        await viewer.until_frame(lambda pts, colour: True)
        used = ports_of(viewer.answer)
    assert used and all(port in ports for port in used), used


def test_where_all_ports_are_taken_a_viewer_is_told_and_one_comes_in_later() -> None:
    ports = free_range(4)

    async def main() -> None:
        async with open_site() as site:
            with taken(ports):
                refused = await site.post(await site.offer())
                assert (refused.status_code, refused.json()["code"]) == (503, "ports")
                assert "serve.udp_ports" in refused.json()["detail"] and int(refused.headers["retry-after"]) > 0
            assert site.state.viewers.count == 0, "the place is free again"
            await (await site.watch()).frame()

    with asyncio.Runner(loop_factory=partial(UdpPortLoop, ports)) as runner:
        runner.run(main())


async def test_where_no_socket_can_be_opened_a_viewer_is_told_so_and_one_comes_in_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where too many files are open. No range of ports is to blame."""

    async def no_socket(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    async with open_site() as site:
        peer = await site.offer()
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "create_datagram_endpoint", no_socket)
            refused = await site.post(peer)
        assert (refused.status_code, refused.json()["code"]) == (503, "network")
        assert int(refused.headers["retry-after"]) > 0
        assert site.state.viewers.count == 0, "the place is free again"
        await (await site.watch()).frame()
