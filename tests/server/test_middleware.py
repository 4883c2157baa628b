"""What every request meets and every answer carries, on a running server: Host, Origin, headers, errors."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.server.app_state import AppState
from streamdiff.server.middleware import SECURITY_HEADERS
from tests.server.conftest import Site, bearer, open_site
from tests.server.socket_client import SocketClient

pytestmark = pytest.mark.slow
CONTROL = "/api/sessions/default/control"
PROXY: dict[str, Any] = {"trusted_proxies": ["127.0.0.0/8"]}


async def raw(site: Site, request: bytes) -> bytes:
    """Send a request as it is; the whole answer, until the server closes."""
    reader, writer = await asyncio.open_connection(*site.address)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_page_whose_name_points_here_can_neither_read_nor_steer() -> None:
    async with open_site() as site:
        before = site.live.state(may_control=True)
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
        assert site.live.state(may_control=True) == before
        assert (await site.http.get("/healthz", headers=evil)).status_code == 200
        assert 'streamdiff_control_sockets_refused_total{reason="host"} 1.0' in (await site.http.get("/metrics")).text


async def test_names_that_are_given_are_this_server_s_own() -> None:
    async with open_site(Config(serve=ServeConfig(hosts=["stream.example.org"]))) as site:
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


async def test_a_request_without_a_name_is_refused_unless_it_is_a_probe() -> None:
    async with open_site() as site:
        for path, status in [("/api/state", b"400"), ("/healthz", b"200"), ("/readyz", b"200")]:
            answer = await raw(site, f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert answer.split()[1] == status, answer


async def test_an_address_names_its_methods_once() -> None:
    async with open_site() as site:
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


@pytest.mark.parametrize(
    ("config", "prefix", "base"),
    [({"root_path": "/ai/"}, "", "/ai"), (PROXY, "/ai", ""), ({**PROXY, "root_path": "/other"}, "/ai/", "/ai")],
)
async def test_below_a_path_prefix_every_address_has_it(config: dict[str, Any], prefix: str, base: str) -> None:
    """Whether the proxy takes it off or not: `base`."""
    root, forwarded = "/ai", {"X-Forwarded-Prefix": prefix} if prefix else {}
    async with open_site(Config(serve=ServeConfig(**config))) as site:
        site.http.headers.update(forwarded)
        made = await site.http.post(f"{base}/api/sessions", json={})
        id, token = made.json()["id"], bearer(made.json()["control_token"])
        assert made.headers["location"] == f"{root}/api/sessions/{id}"
        listed = (await site.http.get(f"{base}/api/sessions")).json()["sessions"]
        assert {each["whep"] for each in listed} == {f"{root}/whep/default", f"{root}/whep/{id}"}
        paused = await site.http.post(f"{base}/api/sessions/{id}/pause", headers=token)
        assert paused.json()["session"]["control"] == f"{root}/api/sessions/{id}/control"
        offer = (await site.offer()).pc.localDescription.sdp
        watching = await site.http.post(f"{base}/whep", content=offer, headers={"Content-Type": "application/sdp"})
        viewer = watching.headers["location"]
        assert viewer.startswith(f"{root}/whep/default/")
        assert (await site.http.delete(base + viewer.removeprefix(root))).status_code == 200
        moved = await site.http.get(f"{base}/api/sessions/?a=b", headers={"X-Forwarded-Proto": "https"})
        assert (moved.status_code, moved.headers["location"]) == (307, f"{root}/api/sessions?a=b")
        if base:
            assert (await site.http.get(root)).headers["location"] == f"{root}/", "the page's addresses are relative"
        assert (await site.http.get(f"{base}/api/openapi.json")).json()["servers"] == [{"url": root}]
        assert "error" in (await site.http.get(f"{base}/v1/videos")).json(), "as OpenAI's clients read it"
        assert (await site.http.get(f"{base}/static/app.js")).headers["cache-control"] == "no-cache"
        assert "GET" in (await site.http.put(f"{base}/whep")).headers["allow"]
        socket = await SocketClient.connect(site.base, base + CONTROL, headers=forwarded)
        assert socket.status == 101
        await socket.close()


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_prefix_is_a_plain_path_and_a_trusted_proxy_s(trusted: bool) -> None:
    wrong = ["//evil.example", "https://evil.com", "/a/../b", '/a"b', "/a b", "/a\\b", "/a,/b", "/a%2f", "/.", "/a//b"]
    async with open_site(Config(serve=ServeConfig(**(PROXY if trusted else {})))) as site:
        for prefix in wrong if trusted else [*wrong, "/ai"]:
            listed = await site.http.get("/api/sessions", headers={"X-Forwarded-Prefix": prefix})
            assert listed.json()["sessions"][0]["whep"] == "/whep/default", prefix


async def test_head_is_answered_wherever_get_is(tmp_path: Path) -> None:
    paths = ["/", "/healthz", "/readyz", "/metrics", "/frame.jpg", "/static/app.js", "/api/state", "/api/openapi.json"]
    paths += ["/api/sessions", "/api/sessions/default", "/api/sessions/default/outputs", "/v1/models", "/v1/videos"]
    paths += ["/v1/videos/nobody", "/v1/videos/nobody/content"]
    async with open_site(Config(serve=ServeConfig(jobs_dir=str(tmp_path)))) as site:
        live = site.state.manager.get("default")
        await site.until(lambda: live is not None and live.playback.pacer.picture() is not None)
        for path in paths:
            head, get = await site.http.head(path), await site.http.get(path)
            assert (head.status_code, set(head.headers)) == (get.status_code, set(get.headers)), path
            assert (head.content, get.status_code) == (b"", 404 if "nobody" in path else 200), path
            assert head.headers["content-type"] == get.headers["content-type"]
            assert int(head.headers["content-length"]) > 0
        assert (await site.http.head("/api/control")).status_code == 405


async def test_pages_of_an_allowed_origin_send_and_read_what_clients_need() -> None:
    page, sent = "https://friend.example", "authorization,x-stainless-lang,openai-organization,range,idempotency-key"
    asks = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": sent}
    async with open_site(Config(serve=ServeConfig(cors_origins=[page]))) as site:
        for origin, status in ((page, 200), ("https://stranger.example", 400)):
            before = await site.http.options("/v1/videos", headers={**asks, "Origin": origin})
            allowed = before.headers.get("access-control-allow-origin"), before.headers["access-control-allow-headers"]
            assert before.status_code == status
            assert status == 400 or allowed == (page, sent)
        answer = await site.http.get("/api/state", headers={"Origin": page, "Range": "bytes=0-1"})
        read = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"content-disposition", "openai-poll-after-ms", "content-range", "location", "retry-after"} <= set(read)


async def test_a_fault_of_the_server_is_a_problem_document_and_once_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(state: AppState) -> None:
        raise ZeroDivisionError("a fault of ours")

    async with open_site() as site:
        monkeypatch.setattr(AppState, "update_metrics", fail)
        answer = await site.http.get("/metrics")
        assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
        assert answer.json()["status"] == 500
        assert "ours" not in answer.text and "Traceback" not in answer.text
        assert {name: answer.headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS
        assert answer.headers["cache-control"] == "no-store"
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert "a fault of ours" in caplog.text


async def test_who_leaves_in_the_middle_of_a_body_leaves_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    types = {"POST /whep": "application/sdp", "PATCH /whep/d/x": "application/trickle-ice-sdpfrag"}
    types |= dict.fromkeys(("POST /api/control", "POST /api/sessions"), "application/json")
    async with open_site() as site:
        for line, kind in types.items():
            head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 100\r\n\r\n{{"
            with socket.create_connection(site.address) as leaving:
                leaving.sendall(head.encode())
                await site.until(lambda: site.server.server_state.tasks)
            await site.until(lambda: not site.server.server_state.tasks)
    assert caplog.text == ""


async def test_the_page_may_play_from_the_media_server_that_is_named_and_who_only_watches_is_told_of_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "control").write_text("a-token-to-steer-with")
    sfu = "https://sfu.example.org:8443/whep/one"
    async with open_site(Config(serve=ServeConfig(control_token_file=str(tmp_path / "control"), whep_url=sfu))) as site:
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
