"""What every request meets and every answer carries, on a running server: Host, Origin, headers, errors."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.server.app_state import AppState
from streamdiff.server.middleware import SECURITY_HEADERS
from tests.server.conftest import Site, bearer, run_scene
from tests.server.socket_client import SocketClient

pytestmark = pytest.mark.slow
CONTROL = "/api/sessions/default/control"


async def raw(site: Site, request: bytes) -> bytes:
    """Send a request as it is; the whole answer, until the server closes."""
    reader, writer = await asyncio.open_connection(*site.address)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


def test_a_page_whose_name_points_here_can_neither_read_nor_steer() -> None:
    async def scene(site: Site) -> None:
        before = site.state.manager.get("default").state(may_control=True)  # type: ignore[union-attr]
        port = site.address[1]
        evil = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
        answers = [
            await site.http.post("/api/control", json={"type": "pause"}, headers=evil),
            await site.http.get("/api/state", headers=evil),
            await site.http.get("/", headers=evil),
            await site.http.get("/readyz", headers=evil),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["code"]) == (421, "host")
            assert "--allowed-host evil.example" in answer.json()["detail"]
            assert answer.headers["content-type"] == "application/problem+json"
        denied = await SocketClient.connect(f"http://{evil['Host']}", CONTROL, to=site.address)
        assert (denied.status, denied.problem["code"]) == (421, "host")
        await denied.close()
        assert site.state.manager.get("default").state(may_control=True) == before  # type: ignore[union-attr]
        assert (await site.http.get("/healthz", headers=evil)).status_code == 200
        assert 'streamdiff_control_sockets_refused_total{reason="host"} 1.0' in (await site.http.get("/metrics")).text

    run_scene(scene)


def test_names_that_are_given_are_this_server_s_own() -> None:
    async def scene(site: Site) -> None:
        port = site.address[1]
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "192.0.2.7", "stream.example.org"):
            page = {"Origin": f"http://{host}"}
            answer = await site.http.post("/api/control", json={"type": "get"}, headers={"Host": host} | page)
            assert answer.status_code == 200, host
            opened = await SocketClient.connect(f"http://{host}", CONTROL, to=site.address, headers=page)
            assert opened.status == 101, host
            await opened.close()
        # Both are its own, and still it is a page of another one.
        crossed = {"Host": "stream.example.org", "Origin": f"http://localhost:{port}"}
        assert (await site.http.post("/api/control", json={"type": "get"}, headers=crossed)).json()["code"] == "origin"

    run_scene(scene, Config(serve=ServeConfig(hosts=["stream.example.org"])))


def test_a_request_without_a_name_is_refused_unless_it_is_a_probe() -> None:
    async def scene(site: Site) -> None:
        for path, status in [("/api/state", b"400"), ("/healthz", b"200"), ("/readyz", b"200")]:
            answer = await raw(site, f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert answer.split()[1] == status, answer

    run_scene(scene)


def test_an_address_names_its_methods_once() -> None:
    async def scene(site: Site) -> None:
        for path, methods in [
            ("/whep", {"GET", "HEAD", "OPTIONS", "POST"}),
            ("/whep/default", {"GET", "HEAD", "OPTIONS", "POST"}),
            ("/whep/default/x", {"GET", "HEAD", "OPTIONS", "PATCH", "DELETE"}),
            ("/", {"GET", "HEAD"}),
            ("/static/app.js", {"GET", "HEAD"}),
            ("/api/control", {"POST"}),
        ]:
            answer = await site.http.request("PUT", path)
            assert answer.status_code == 405
            assert [set(value.split(", ")) for value in answer.headers.get_list("allow")] == [methods]

    run_scene(scene)


def test_a_fault_of_the_server_is_a_problem_document_and_once_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(state: AppState) -> None:
        raise ZeroDivisionError("a fault of ours")

    async def scene(site: Site) -> None:
        monkeypatch.setattr(AppState, "update_metrics", fail)
        answer = await site.http.get("/metrics")
        assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
        assert answer.json()["status"] == 500
        assert "ours" not in answer.text and "Traceback" not in answer.text
        assert {name: answer.headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS
        assert answer.headers["cache-control"] == "no-store"

    run_scene(scene)
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert "a fault of ours" in caplog.text


@pytest.mark.parametrize("request_line", ["POST /whep", "POST /api/control", "POST /api/sessions", "PATCH /whep/d/x"])
def test_who_leaves_in_the_middle_of_a_body_leaves_nothing_in_the_log(
    request_line: str, caplog: pytest.LogCaptureFixture
) -> None:
    types = {"POST /whep": "application/sdp", "PATCH /whep/d/x": "application/trickle-ice-sdpfrag"}

    async def scene(site: Site) -> None:
        with socket.create_connection(site.address) as leaving:
            kind = types.get(request_line, "application/json")
            head = (
                f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 100\r\n\r\n{{"
            )
            leaving.sendall(head.encode())
            await site.until(lambda: site.server.server_state.tasks)
        await site.until(lambda: not site.server.server_state.tasks)

    run_scene(scene)
    assert caplog.text == ""


def test_the_page_may_play_from_the_media_server_that_is_named_and_who_only_watches_is_told_of_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "control").write_text("a-token-to-steer-with")
    sfu = "https://sfu.example.org:8443/whep/one"

    async def scene(site: Site) -> None:
        policy = (await site.http.get("/")).headers["content-security-policy"]
        assert "connect-src 'self' https://sfu.example.org:8443;" in policy
        assert policy.replace(" https://sfu.example.org:8443", "") == SECURITY_HEADERS["Content-Security-Policy"]
        other = (await site.http.post("/api/sessions", headers=bearer("a-token-to-steer-with"), json={})).json()["id"]
        links = {
            (address, token): (await site.http.options(address, headers=bearer(token))).headers.get("link")
            for address in ("/whep", f"/whep/{other}")
            for token in ("", "a-token-to-steer-with")
        }
        told = {where for where, link in links.items() if link == f'<{sfu}>; rel="alternate"'}
        assert told == {("/whep", "")} and set(links.values()) == {None, f'<{sfu}>; rel="alternate"'}

    run_scene(scene, Config(serve=ServeConfig(control_token_file=str(tmp_path / "control"), whep_url=sfu)))
