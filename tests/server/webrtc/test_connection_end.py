"""How viewers' connections end, whatever they are doing just then, and that nothing of them is left. The private names
of aiortc that we lean on."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import re
import struct
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aioice
import httpx
import psutil
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpTransceiver
from aiortc.rtp import RTCP_PSFB, RTCP_PSFB_APP, RTCP_RTPFB_NACK, RtcpRtpfbPacket, pack_rtcp_packet

from streamdiff import clock
from streamdiff.errors import StreamdiffError
from streamdiff.server.peers import SlotPool
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.webrtc import aiortc_compat, peer_connections
from streamdiff.server.webrtc.ice import IceServers
from streamdiff.server.webrtc.peer_connections import Peer, Peers, Viewer, Viewers
from streamdiff.server.webrtc.sender import RESEND_BURST, RESENT_PER_S, VideoSender
from tests.server.conftest import Site, open_site
from tests.server.webrtc.test_sdp import _offer  # a good one, of a peer that has left


@pytest.mark.slow
@pytest.mark.parametrize("joins", ["before the viewers are sent away", "after it"])
async def test_nobody_joins_a_session_that_is_being_ended(joins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The viewer's negotiation begins before the DELETE and ends in the middle of it."""
    negotiate = Viewers._negotiate

    async with open_site() as site:
        opened = (await site.http.post("/api/sessions", json={"prompt": "purple"})).json()
        live = site.state.manager.get(opened["id"])
        assert live is not None
        negotiating, ending = asyncio.Event(), asyncio.Event()
        end_viewers = site.state.manager.on_end
        assert end_viewers is not None

        async def slow_negotiate(self: Viewers, viewer: Viewer, *rest: Any) -> str:
            answer = await negotiate(self, viewer, *rest)
            negotiating.set()
            await ending.wait()
            return answer

        monkeypatch.setattr(Viewers, "_negotiate", slow_negotiate)
        peer = await site.offer()
        headers = {"Authorization": f"Bearer {opened['control_token']}"}
        posting = asyncio.create_task(site.post(peer, session=live.id, token=opened["view_token"]))
        await negotiating.wait()

        async def on_end(ended: LiveSession) -> None:
            if joins.startswith("after"):
                await end_viewers(ended)
            ending.set()
            await posting
            if joins.startswith("before"):
                await end_viewers(ended)

        site.state.manager.on_end = on_end
        assert (await site.http.delete(f"/api/sessions/{live.id}", headers=headers)).status_code == 200
        response = await posting
        assert response.status_code == 410, response.text
        assert response.json()["code"] == "ended"
        assert site.state.viewers.count == 0
        assert live.playback.codecs == (), "nothing is encoded for a session that has ended"


# ---- what is left ----------------------------------------------------------------------------------------------------


def _held() -> tuple[set[str], int]:
    """What aiortc and aioice do in this process, and how many files are open."""
    gc.collect()
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    parts = ("RTC", "Connection.", "StunProtocol.", "Transaction.", "Turn")
    names = {getattr(coroutine, "__qualname__", "") for coroutine in coroutines}
    return {name for name in names if name.startswith(parts)}, psutil.Process().num_fds()


async def _post(site: Site, offer: str) -> httpx.Response:
    response = await site.http.post("/whep", content=offer, headers={"Content-Type": "application/sdp"})
    assert response.status_code == 201, response.text
    return response


async def _delete(site: Site, response: httpx.Response) -> None:
    assert (await site.http.delete(response.headers["location"])).status_code == 200


async def _ice_only(site: Site) -> tuple[httpx.Response, aioice.Connection]:
    """A viewer that finds the way to the server and then says nothing, so that DTLS never gets done."""
    peer = aioice.Connection(ice_controlling=True)
    await peer.gather_candidates()
    offer = re.sub(r"a=(candidate|end-of-candidates).*\r\n", "", await _offer("video"))
    offer = re.sub(r"a=ice-ufrag:.*", f"a=ice-ufrag:{peer.local_username}\r", offer)
    offer = re.sub(r"a=ice-pwd:.*", f"a=ice-pwd:{peer.local_password}\r", offer)
    own = "".join(f"a=candidate:{each.to_sdp()}\r\n" for each in peer.local_candidates)
    response = await _post(site, offer.replace("a=mid:0\r\n", "a=mid:0\r\n" + own))
    peer.remote_username = re.search(r"a=ice-ufrag:(\S+)", response.text).group(1)  # type: ignore[union-attr]
    peer.remote_password = re.search(r"a=ice-pwd:(\S+)", response.text).group(1)  # type: ignore[union-attr]
    for text in re.findall(r"a=candidate:(.*)\r", response.text):
        await peer.add_remote_candidate(aioice.Candidate.from_sdp(text))
    await peer.add_remote_candidate(None)
    return response, peer


def _connection(site: Site) -> RTCPeerConnection:
    [viewer] = site.state.viewers._peers.values()
    return viewer.sender.pc


@pytest.mark.slow
async def test_a_connection_that_gets_no_time_to_close_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine so busy that the time is over before the event loop comes to it."""
    monkeypatch.setattr(peer_connections, "CLOSE_S", 0.0)

    async with open_site() as site:
        offer = await _offer("video")
        await _delete(site, await _post(site, offer))
        before, files = _held()
        assert not before
        for posted in [await _post(site, offer) for _ in range(4)]:
            await _delete(site, posted)
        assert not _held()[0] and "do not end" not in caplog.text
        await site.until(lambda: _held()[1] <= files)


@pytest.mark.slow
async def test_a_connection_whose_good_bye_does_not_get_away_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "CLOSE_S", 0.1)

    async with open_site() as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        await peer.frame()
        [sender] = _connection(site).getSenders()

        async def never(data: bytes) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(sender.transport, "_send_rtp", never)
        assert (await site.http.delete(peer.location)).status_code == 200
        await peer.pc.close()
        await site.until(lambda: not _held()[0])


async def test_a_connection_whose_close_raises_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    async def raising() -> None:
        raise ConnectionError("its transport is gone")

    files = _held()[1]
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    pc.createDataChannel("control")
    await pc.setLocalDescription(await pc.createOffer())
    assert _held()[1] > files, "it has sockets"
    monkeypatch.setattr(pc, "close", raising)
    assert not await aiortc_compat.close(pc, 1.0)
    async with asyncio.timeout(10):
        while _held()[1] > files:
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("handshake_ends", ["after the transport", "before it"])
async def test_a_connection_in_the_middle_of_its_handshake_leaves_nothing_and_is_no_error(
    handshake_ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = aioice.Connection.close

    async def late_close(self: aioice.Connection) -> None:
        self._queue.put_nowait(None)  # the handshake fails
        for _ in range(10):
            await asyncio.sleep(0)
        await close(self)

    async with open_site() as site:
        if handshake_ends == "before it":
            monkeypatch.setattr(aioice.Connection, "close", late_close)
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        posted, peer = await _ice_only(site)
        await peer.connect()
        [dtls] = _connection(site)._RTCPeerConnection__dtlsTransports  # type: ignore[attr-defined]
        await site.until(lambda: dtls.state == "connecting")
        await _delete(site, posted)
        await peer.close()
        assert not _held()[0]
        assert not errors


async def test_a_connection_that_has_ended_before_it_is_registered_leaves_its_slot() -> None:
    """It may end while its offer is being answered; nobody is told a second time."""

    class Connections(Peers[Peer]):
        async def _end(self, peer: Peer, end: str) -> None:
            self._unregister(peer)

    slots, pc = SlotPool(1, 1.0, "viewers", "serve.max_viewers"), RTCPeerConnection()
    connections = Connections(slots, IceServers([]))
    session = SimpleNamespace(id="s", closed=False)
    async with connections._admitted(Peer(session, pc, "::1", None)):  # type: ignore[arg-type]
        assert slots.count == 1
        await pc.close()
    await asyncio.gather(*connections._closing)
    assert slots.count == 0


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0", "2.0"])
def test_another_version_is_refused_with_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(StreamdiffError):
        aiortc_compat.check()


def test_loopback_is_offered_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiortc_compat, "_all_host_addresses", lambda use_ipv4, use_ipv6: [])
    assert aiortc_compat.host_addresses(True, True) == ["127.0.0.1"]
    assert aiortc_compat.host_addresses(False, True) == []
    monkeypatch.setattr(aiortc_compat, "_all_host_addresses", lambda use_ipv4, use_ipv6: ["192.0.2.1"])
    assert aiortc_compat.host_addresses(True, True) == ["192.0.2.1"]


async def _bound_sender() -> tuple[VideoSender, RTCRtpTransceiver]:
    """The sending side of a connection that was offered and is not made."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    peer.addTransceiver("video", direction="recvonly")
    offer = await peer.createOffer()
    sender = VideoSender(Mock())
    transceiver = sender.add_transceiver(("vp8",))
    await sender.pc.setRemoteDescription(offer)
    assert sender.bind(transceiver)
    await peer.close()
    return sender, transceiver


async def test_a_peer_is_sent_a_lost_packet_once_for_a_request_and_so_many_in_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []

    async def retransmit(number: int) -> None:
        sent.append(number)

    sender, transceiver = await _bound_sender()
    transceiver.sender._retransmit = retransmit  # type: ignore[method-assign]
    now_s = [clock.monotonic_s()]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s[0])

    async def ask(lost: list[int]) -> list[int]:
        sent.clear()
        await transceiver.sender._handle_rtcp_packet(RtcpRtpfbPacket(RTCP_RTPFB_NACK, 1, 2, lost))
        return list(sent)

    assert await ask([7, 9, 7, 7, 9, 8]) == [7, 9, 8]
    most = int(RESEND_BURST) - 3
    assert await ask(list(range(5000))) == list(range(most))
    assert await ask([1]) == []
    now_s[0] += 10 / RESENT_PER_S
    assert len(await ask(list(range(100)))) in (9, 10), "rounding"
    assert await sender.close(5.0)


@pytest.mark.parametrize("body", [b"REMB\xff\x00\x00\x00", b"REMB", b""])
async def test_rtcp_that_cannot_be_read_leaves_the_connection_alone(body: bytes) -> None:
    sender, transceiver = await _bound_sender()
    packet = pack_rtcp_packet(RTCP_PSFB, RTCP_PSFB_APP, struct.pack("!LL", 1, 0) + body)
    await transceiver.sender.transport._handle_rtcp_data(packet)
    assert await sender.close(5.0)
