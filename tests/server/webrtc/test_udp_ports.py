"""Viewers' media on UDP ports of a range, as a firewall opens them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import httpx
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from streamdiff.server.webrtc.ice import UdpPortLoop
from tests.server.conftest import LIMIT_S, Site, open_site
from tests.server.test_main import printed_address, start

pytestmark = pytest.mark.slow


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


def run_on(ports: range, scene: Callable[[Site], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_site() as site:
            await scene(site)

    with asyncio.Runner(loop_factory=partial(UdpPortLoop, ports)) as runner:
        runner.run(main())


def ports_of(sdp: str) -> list[int]:
    return [int(port) for port in re.findall(r"^a=candidate:\S+ 1 udp \d+ \S+ (\d+) typ host", sdp, re.MULTILINE)]


@pytest.mark.usefixtures("forked")
def test_media_comes_from_ports_of_the_range() -> None:
    ports = free_range(8)
    process = start("--port", "0", "--udp-ports", f"{ports[0]}-{ports[-1]}")

    async def watch(url: str) -> list[int]:
        pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        try:
            pc.addTransceiver("video", direction="recvonly")
            await pc.setLocalDescription(await pc.createOffer())
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
                offer = pc.localDescription.sdp
                answer = await http.post("/whep", content=offer, headers={"Content-Type": "application/sdp"})
            await pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
            await asyncio.wait_for(pc.getReceivers()[0].track.recv(), LIMIT_S)
            return ports_of(answer.text)
        finally:
            await pc.close()

    try:
        used = asyncio.run(watch(printed_address(process)))
        assert used and all(port in ports for port in used), used
    finally:
        process.kill()
        process.communicate()


def test_where_all_ports_are_taken_a_viewer_is_told_and_one_comes_in_later() -> None:
    ports = free_range(4)

    async def scene(site: Site) -> None:
        with taken(ports):
            refused = await site.post(await site.offer())
            assert (refused.status_code, refused.json()["code"]) == (503, "ports")
            assert "serve.udp_ports" in refused.json()["detail"] and int(refused.headers["retry-after"]) > 0
        assert site.state.viewers.count == 0, "the place is free again"
        await (await site.watch()).frame()

    run_on(ports, scene)
