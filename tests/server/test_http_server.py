"""How connections are accepted and how long they may take, on a running server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.server import app_state, http_server, main
from streamdiff.server.peers import group_of
from tests.server.conftest import Site, open_site
from tests.server.socket_client import SocketClient

pytestmark = pytest.mark.slow
SDP = {"Content-Type": "application/sdp"}
CONTROL = "/api/sessions/default/control"
HEAD = b"POST /api/control HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
BEHIND_A_PROXY: dict[str, Any] = {"trusted_proxies": ["127.0.0.0/8"]}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(site: Site, *sent: bytes) -> AsyncIterator[list[Connection]]:
    """Connections over which so much was sent, in this order."""
    opened = [await asyncio.open_connection(*site.address) for _ in sent]
    for (_, writer), data in zip(opened, sent, strict=True):
        writer.write(data)
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def until_closed(connection: Connection) -> bytes:
    """Wait until the server closes it; what it sent before."""
    async with asyncio.timeout(20):
        try:
            return await connection[0].read()
        except ConnectionResetError:
            return b""


async def drip(connection: Connection, data: bytes) -> None:
    """Send a byte now and then, until the server has enough of it."""
    for number in range(len(data)):
        if connection[1].is_closing():
            return
        connection[1].write(data[number : number + 1])
        await asyncio.sleep(0.05)
    raise AssertionError("the server took it all")


def seen_from(address: str) -> dict[str, str]:
    """The headers of a request that a proxy passes on."""
    return {"X-Forwarded-For": address}


async def changes(site: Site, *addresses: str) -> list[int]:
    """The answers to a control message from each address."""
    answers = []
    for address in addresses:
        answers.append(await site.http.post("/api/control", json={"type": "get"}, headers=seen_from(address)))
    return [answer.status_code for answer in answers]


async def test_small_answers_do_not_wait_for_an_acknowledgement() -> None:
    async with open_site() as site:
        await site.http.get("/healthz")  # the connection stays open
        accepted = [
            connection.transport.get_extra_info("socket") for connection in site.server.server_state.connections
        ]
        options = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in accepted]
        assert options and all(options)


async def test_requests_that_do_not_come_are_not_waited_for_and_web_sockets_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 1.0)
    async with open_site() as site:
        steering = await SocketClient.connect(site.base, CONTROL)
        late = (b"", HEAD, HEAD + b"\r\n", HEAD + b"\r\n{", b"", HEAD + b"\r\n")
        answered = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        async with connected(site, *late, answered) as opened:
            dripped = [asyncio.create_task(drip(opened[number], b"X" * 1000)) for number in (-2, -3)]
            *nothing, answer = await asyncio.gather(*(until_closed(each) for each in opened))
            assert nothing == [b""] * len(late)
            assert answer.startswith(b"HTTP/1.1 200"), "and then no further request came"
            await asyncio.gather(*dripped)
        steering.send({"type": "ping", "id": "still there"})
        assert await steering.message({"type": "pong", "id": "still there"})
        await steering.close()


async def test_silent_connections_make_room_for_those_that_ask(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 3600.0)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 20)
    async with open_site() as site, connected(site, *[b""] * 50) as opened:
        for path in ("/healthz", "/api/state"):
            async with httpx.AsyncClient(base_url=site.base, timeout=20) as http:
                assert (await http.get(path)).status_code == 200
        assert [await until_closed(each) for each in opened[:41]] == [b""] * 41, "the oldest went"
        assert len(site.server.server_state.connections) <= 10, "half of twenty"
    assert caplog.text == ""


async def test_where_all_connections_are_at_work_health_is_answered_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    async with open_site() as site:

        async def steer() -> int:
            async with httpx.AsyncClient(base_url=site.base, timeout=20) as http:
                return (await http.post("/api/control", json={"type": "reset"})).status_code

        await site.http.aclose()
        with site.client.held():
            busy = [asyncio.create_task(steer()) for _ in range(4)]
            await site.until(lambda: len(site.server.server_state.tasks) == 4)
            async with httpx.AsyncClient(base_url=site.base, timeout=20) as http:
                assert (await http.get("/healthz")).status_code == 200
                refused = await http.get("/api/state")
                assert (refused.status_code, refused.json()["code"]) == (503, "connections")
                assert int(refused.headers["retry-after"]) >= 1
            denied = await SocketClient.connect(site.base, CONTROL)
            assert (denied.status, denied.problem["code"]) == (503, "connections")
            await denied.close()
        assert {status for status in await asyncio.gather(*busy)} <= {200, 202}
        async with httpx.AsyncClient(base_url=site.base, timeout=20) as http:
            assert (await http.get("/api/state")).status_code == 200


async def test_clients_that_read_nothing_make_room_for_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STALLED_S", 0.2)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(main, "UNREAD_S", 600)  # which would end them too
    much = b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    async with open_site(Config(serve=ServeConfig(address_share=1.0))) as site:
        await site.http.aclose()
        async with connected(site, *[much] * 8) as opened:
            for reader, _ in opened:
                reader._transport.pause_reading()  # type: ignore[attr-defined]
            held = site.server.server_state.connections
            await site.until(lambda: len(held) == 8 and all(each.flow.write_paused for each in held))
            status = 503
            async with asyncio.timeout(60):
                while status == 503:
                    async with httpx.AsyncClient(base_url=site.base, timeout=20) as http:
                        status = (await http.get("/")).status_code
            assert status == 200 and len(held) >= 7, "the others were left alone"


async def test_nobody_escapes_a_limit_by_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_state, "REQUESTS_PER_S", 0.001)
    monkeypatch.setattr(app_state, "REQUEST_BURST", 2.0)
    async with open_site() as site:
        assert await changes(site, "192.0.2.1", "192.0.2.2", "192.0.2.3") == [200, 200, 429]


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
async def test_behind_a_trusted_proxy_everybody_has_limits_of_their_own(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where IPv4 comes to a socket of IPv6."""
    monkeypatch.setattr(app_state, "REQUESTS_PER_S", 0.001)
    monkeypatch.setattr(app_state, "REQUEST_BURST", 2.0)
    async with open_site(Config(serve=ServeConfig(**BEHIND_A_PROXY)), host=host) as site:
        one, two = "192.0.2.1", "198.51.100.9, 192.0.2.2"  # what the second says of itself goes before
        assert await changes(site, one, one, one) == [200, 200, 429]
        assert await changes(site, two, "203.0.113.9, 192.0.2.2", two) == [200, 200, 429]
        network = [f"2001:db8::{number}" for number in range(1, 4)]
        assert await changes(site, *network, "2001:db8:0:1::1") == [200, 200, 429, 200]


async def test_one_address_holds_half_of_the_viewers_places_at_most_also_without_ever_connecting() -> None:
    async with open_site(Config(serve=ServeConfig(max_viewers=4, **BEHIND_A_PROXY))) as site:
        offer = (await site.offer()).pc.localDescription.sdp

        async def post(address: str) -> httpx.Response:
            return await site.http.post("/whep", content=offer, headers=SDP | seen_from(address))

        mine = [await post("192.0.2.1") for _ in range(3)]
        assert [each.status_code for each in mine] == [201, 201, 429]
        assert mine[2].json()["code"] == "address" and "serve.address_share" in mine[2].json()["detail"]
        assert int(mine[2].headers["retry-after"]) >= 1
        theirs = [await post(address) for address in ("192.0.2.2", "192.0.2.3", "192.0.2.4")]
        assert [each.status_code for each in theirs] == [201, 201, 503], "and then all four are taken"
        assert (await site.http.delete(mine[0].headers["location"])).status_code == 200
        assert (await post("192.0.2.1")).status_code == 201
        assert site.state.viewers.count == 4


def test_whoever_has_one_ipv6_address_has_its_whole_network() -> None:
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:1%eth0") != group_of("2001:db8:0:1::1")
    assert group_of("::ffff:192.0.2.1") == "192.0.2.1" == group_of("192.0.2.1")
    assert group_of("no address") == "no address"
