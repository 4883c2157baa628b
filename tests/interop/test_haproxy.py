"""deploy/haproxy.cfg as it stands, but for addresses, in a real HAProxy before real servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
import yaml
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from tests.free_ports import free_ports
from tests.rules.source import ROOT
from tests.server.test_restart import Server, start

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.haproxy]

LIMIT_S = 240.0
CONFIGURATION = ROOT / "deploy" / "haproxy.cfg"


class Fleet:
    """Servers a, b and c, those that were started, and a balancer before them."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(7)
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.ports = dict(zip("abc", zip(ports[1::2], ports[2::2], strict=True), strict=True))
        text = CONFIGURATION.read_text("utf-8").replace("bind :8080", f"bind 127.0.0.1:{ports[0]}")
        for number, name in enumerate("abc", 1):
            http, agent = self.ports[name]
            line = rf"server {name} 10\.0\.0\.{number}:8000"
            here = f"server {name} 127.0.0.1:{http}"
            text, found = re.subn(rf"{line} agent-port 8100", f"{here} agent-port {agent}", text)
            text, others = re.subn(line, here, text)
            assert (found, others) == (1, 2), name
        self.configuration = folder / "haproxy.cfg"
        self.configuration.write_text(text, "utf-8")
        self.servers: dict[str, Server] = {}

    def start(self, name: str, load: float, drain_s: float = 0.0) -> None:
        http, agent = self.ports[name]
        words = ("--server-name", name, "--agent-port", str(agent), "--load", str(load), "--drain-s", str(drain_s))
        self.servers[name] = start("--port", str(http), *words)

    def start_balancer(self) -> None:
        program = shutil.which("haproxy") or "/usr/sbin/haproxy"
        self.balancer = subprocess.Popen([program, "-f", self.configuration, "-db"], stderr=subprocess.DEVNULL)

    def kill_balancer(self) -> None:
        self.balancer.kill()
        self.balancer.wait()

    @contextlib.contextmanager
    def balanced(self) -> Iterator[None]:
        """Wait for the servers; a balancer runs meanwhile."""
        try:
            for server in self.servers.values():
                server.address()
            self.start_balancer()
            try:
                yield
            finally:
                self.kill_balancer()
        finally:
            for server in self.servers.values():
                server.process.kill()
                server.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.1)


async def watch(http: httpx.AsyncClient, session: str) -> RTCPeerConnection:
    """A viewer of a session, through the balancer; its video comes from the server directly."""
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    pc.addTransceiver("video", direction="recvonly")
    await pc.setLocalDescription(await pc.createOffer())
    headers = {"Content-Type": "application/sdp"}
    answer = await http.post(f"/whep/{session}", content=pc.localDescription.sdp, headers=headers)
    assert answer.status_code == 201, answer.text
    await pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
    return pc


async def fill(address: str) -> list[httpx.Response]:
    """The sessions that could be opened at a server until it was full."""
    opened: list[httpx.Response] = []
    async with httpx.AsyncClient(base_url=address, timeout=LIMIT_S) as http:
        while (response := await http.post("/api/sessions", json={"fps": 5})).status_code == 201:
            opened.append(response)
    assert (response.status_code, response.json()["code"]) == (503, "time")
    return opened


def home(session: str) -> str:
    return session.split("-")[1]


def test_forty_sessions_on_servers_that_fill_up_are_killed_drained_and_added(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    # How many sessions fit is measured, and differs with how busy the machine is: on b twenty times as many as on a.
    fleet.start("a", load=0.5)
    fleet.start("b", load=10.0, drain_s=600.0)

    async def scene() -> None:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=LIMIT_S) as http:

            async def made() -> httpx.Response:
                return await http.post("/api/sessions", json={"fps": 5})

            async def opened_in_the_end() -> httpx.Response:
                """A client comes again when it is told to: on a busy machine b answers a check of the balancer late,
                and then a alone is asked, which is full."""
                async with asyncio.timeout(LIMIT_S):
                    while (response := await made()).status_code == 503:
                        await asyncio.sleep(int(response.headers["retry-after"]) / 10)
                return response

            async def comes_to(name: str) -> bool:
                response = await made()
                return response.status_code == 201 and home(response.json()["id"]) == name

            async def listens() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return bool(await http.get("/healthz"))
                return False

            async def both_up() -> bool:
                return {home((await made()).json().get("id", "- -")) for _ in range(4)} == {"a", "b"}

            await until(listens)
            await until(both_up)
            filling = await fill(f"http://127.0.0.1:{fleet.ports['a'][0]}")
            # The balancer hears only once a second how full a is, so some of these come to a first.
            opened = await asyncio.gather(*(opened_in_the_end() for _ in range(40)))
            assert [each.text for each in opened if each.status_code != 201] == [], "a full server is passed over"
            tokens = {each.json()["id"]: each.json()["control_token"] for each in [*opened, *filling]}
            sessions = list(tokens)
            assert set(map(home, sessions)) == {"a", "b"}
            for session in sessions:
                state = await http.get(f"/api/sessions/{session}")
                assert (state.status_code, state.json()["id"]) == (200, session)
            for session in (next(each for each in sessions if home(each) == name) for name in "ab"):
                sent = {"Authorization": f"Bearer {tokens[session]}", "Content-Type": "text/plain"}
                video = await http.post(f"/whip/{session}", content="no SDP", headers=sent)
                assert video.status_code == 415, "only the server that has the session comes to look at what was sent"
            token = {"Authorization": f"Bearer {tokens[sessions[0]]}"}
            change = await http.patch(f"/api/sessions/{sessions[0]}", json={"prompt": "blue"}, headers=token)
            assert change.status_code == 200
            assert (await http.get("/")).status_code == 200
            foreign = await http.get("/api/sessions/s-nobody-x")
            assert (foreign.status_code, foreign.json()["code"]) == (410, "ended")

            on_a, on_b = (next(each for each in sessions if home(each) == name) for name in "ab")
            viewer = await watch(http, on_b)
            track = viewer.getReceivers()[0].track
            await asyncio.wait_for(track.recv(), LIMIT_S)

            fleet.servers["a"].process.send_signal(signal.SIGKILL)

            async def gone() -> bool:
                response = await http.get(f"/api/sessions/{on_a}")
                return response.status_code == 410 and response.json()["code"] == "ended"

            await until(gone)
            for _ in range(20):
                await asyncio.wait_for(track.recv(), LIMIT_S)
            assert (await http.get(f"/api/sessions/{on_b}")).status_code == 200, "others play on"

            fleet.start("c", load=0.5)
            await until(lambda: comes_to("c"))
            fleet.servers["b"].process.terminate()  # with a viewer it has 600 s
            await until(lambda: only_c(made))
            await asyncio.wait_for(track.recv(), LIMIT_S)
            assert (await http.get(f"/api/sessions/{on_b}")).status_code == 200, "whoever plays on b plays on"

            async def all_full() -> bool:
                response = await made()
                return response.status_code == 503 and int(response.headers["retry-after"]) > 0

            await until(all_full)

            fleet.kill_balancer()
            with pytest.raises(httpx.TransportError):
                await http.get(f"/api/sessions/{on_b}")
            for _ in range(20):
                await asyncio.wait_for(track.recv(), LIMIT_S)
            fleet.start_balancer()
            await until(listens)
            assert (await http.get(f"/api/sessions/{on_b}")).status_code == 200, "control is back"
            await viewer.close()

    async def only_c(made: Callable[[], Awaitable[httpx.Response]]) -> bool:
        return [home((await made()).json().get("id", "- -")) for _ in range(3)] == ["c"] * 3

    with fleet.balanced():
        asyncio.run(scene())


class Named(BaseHTTPRequestHandler):
    """A server that is ready and says which it is."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(self.server.server_port).encode())  # type: ignore[attr-defined]

    def log_message(self, *words: object) -> None: ...


class Pages(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A check of HAProxy's does not wait for what is written."""


@pytest.mark.parametrize("proxied", [True, False])
def test_a_page_comes_to_the_same_server_by_its_user_also_behind_a_proxy(proxied: bool, tmp_path: Path) -> None:
    """What a proxy says of its users is believed where it is named, and not what anybody says."""
    fleet = Fleet(tmp_path)
    if not proxied:
        fleet.configuration.write_text(fleet.configuration.read_text().replace("src 127.0.0.1", "src 10.9.9.9"))
    pages = [Pages(("127.0.0.1", fleet.ports[name][0]), Named) for name in "abc"]
    with contextlib.ExitStack() as stack:
        for page in pages:
            Thread(target=stack.enter_context(page).serve_forever, daemon=True).start()
            stack.callback(page.shutdown)
        stack.enter_context(fleet.balanced())

        async def servers_of(http: httpx.AsyncClient, user: str) -> set[str]:
            spoofed = {"X-Forwarded-For": f"192.0.2.200, {user}"}  # a proxy puts what it sees last
            found = [await http.get("/", headers=spoofed) for _ in range(3)]
            return {each.text for each in found if each.status_code == 200}

        async def scene() -> None:
            async with httpx.AsyncClient(base_url=fleet.url) as http:

                async def all_up() -> bool:  # HAProxy begins with every server taken for one that is up
                    with contextlib.suppress(httpx.TransportError):
                        return (await http.get("/balancerz")).status_code == 200
                    return False

                await until(all_up)
                users = [await servers_of(http, f"198.51.100.{number}") for number in range(24)]
                assert all(len(servers) == 1 for servers in users)
                assert len(set.union(*users)) == (3 if proxied else 1)

        asyncio.run(scene())


@pytest.mark.parametrize("kind", ["cfg", "fleet"])
def test_the_file_is_one_that_haproxy_takes_without_a_remark(kind: str, tmp_path: Path) -> None:
    path = CONFIGURATION
    if kind == "fleet":
        path = tmp_path / "haproxy.cfg"
        documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "fleet.yaml").read_text("utf-8"))
        [text] = [each["data"]["haproxy.cfg"] for each in documents if "haproxy.cfg" in each.get("data", {})]
        path.write_text(text, "utf-8")
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    environment = {**os.environ, "NAMESPACE": "default", "TRUSTED_PROXIES": "10.244.0.0/16"}
    checked = subprocess.run([program, "-c", "-f", str(path)], env=environment, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr
    if kind == "fleet":
        environment["TRUSTED_PROXIES"] = "SET-ME"  # as the file has it
        checked = subprocess.run([program, "-c", "-f", str(path)], env=environment, capture_output=True, text=True)
        assert checked.returncode != 0, "a network that nobody has named"
