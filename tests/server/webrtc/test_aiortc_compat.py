"""The private names of aiortc that we lean on, and what is said when they are gone."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import re
from pathlib import Path

import aioice
import aiortc.rtcrtpsender
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription

from streamdiff.errors import StreamdiffError
from streamdiff.server.webrtc import aiortc_compat


def test_the_installed_aiortc_is_fine() -> None:
    aiortc_compat.check()
    assert aiortc.rtcrtpsender.RTP_HISTORY_SIZE == aiortc_compat.RETRANSMIT_PACKETS  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0", "2.0"])
def test_another_version_is_refused_with_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(StreamdiffError, match=r"1\.16.*1\.17.*pip install"):
        aiortc_compat.check()


def test_a_missing_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RTCRtpSender, "_send_keyframe")
    with pytest.raises(StreamdiffError, match="lacks a name"):
        aiortc_compat.check()


def test_loopback_is_offered_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiortc_compat, "_all_host_addresses", lambda use_ipv4, use_ipv6: [])
    assert aiortc_compat.host_addresses(True, True) == ["127.0.0.1"]
    assert aiortc_compat.host_addresses(False, True) == []
    monkeypatch.setattr(aiortc_compat, "_all_host_addresses", lambda use_ipv4, use_ipv6: ["192.0.2.1"])
    assert aiortc_compat.host_addresses(True, True) == ["192.0.2.1"]


def test_the_ports_of_viewers_are_the_kernel_s_choice() -> None:
    """What docs/operations.md says about UDP. Fails when the libraries learn to bound their ports: then offer it."""
    options = [
        *inspect.signature(aioice.Connection.__init__).parameters,
        *inspect.signature(RTCConfiguration).parameters,
    ]
    assert "stun_server" in options and "iceServers" in options
    assert not [name for name in options if "port" in name.lower().replace("transport", "")]
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    async def answered() -> list[tuple[str, int]]:
        viewer, server = (RTCPeerConnection(RTCConfiguration(iceServers=[])) for _ in range(2))
        viewer.addTransceiver("video", direction="recvonly")
        viewer.createDataChannel("control")
        await viewer.setLocalDescription(await viewer.createOffer())
        await server.setRemoteDescription(RTCSessionDescription(viewer.localDescription.sdp, "offer"))
        await server.setLocalDescription(await server.createAnswer())
        lines = re.findall(r"candidate:\S+ 1 udp \d+ (\S+) (\d+) typ host", server.localDescription.sdp)
        await asyncio.gather(viewer.close(), server.close())
        return [(host, int(port)) for host, port in lines]

    found = set(asyncio.run(answered()))
    assert found and all(low <= port <= high for _, port in found)
    assert len({host for host, _ in found}) == len(found), "one socket for each address, video and control share it"
