"""Viewers' media on UDP ports of a range, as a firewall opens them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

import pytest

from streamdiff.server.webrtc.ice import UdpPortLoop
from tests.server.conftest import open_site
from tests.server.test_restart import serving, watching

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
