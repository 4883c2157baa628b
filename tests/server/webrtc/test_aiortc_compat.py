"""The private names of aiortc that we lean on, and the versions that have them."""

from __future__ import annotations

import importlib.metadata
import struct
from unittest.mock import Mock

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpTransceiver
from aiortc.rtp import RTCP_PSFB, RTCP_PSFB_APP, RTCP_RTPFB_NACK, RtcpRtpfbPacket, pack_rtcp_packet

from streamdiff import clock
from streamdiff.errors import StreamdiffError
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.sender import RESEND_BURST, RESENT_PER_S, VideoSender


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
