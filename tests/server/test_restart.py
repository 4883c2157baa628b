"""An engine that fails under a running server: viewers stay, and see video again; or are told that it is over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from av import VideoFrame

from tests import fork_server
from tests.free_ports import free_port
from tests.server.conftest import Peer
from tests.server.socket_client import SocketClient

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
PAINTED = ("tests.server.scripted", "serve")
MODEL = ("streamdiff", "serve")


@dataclass(eq=False)
class Watching(Peer):
    """A viewer that decodes all it gets. `on_frame` is set with every frame."""

    frames: list[tuple[int, tuple[int, int, int]]] = field(default_factory=list)
    """Presentation time and colour of the top left corner."""
    on_frame: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        while True:
            frame: VideoFrame = await self.track.recv()
            corner = frame.to_ndarray(format="rgb24")[:16, :16].reshape(-1, 3).mean(axis=0)
            self.frames.append((frame.pts, tuple(np.rint(corner).astype(int).tolist())))
            self.on_frame.set()

    async def until_frame(self, condition: Any) -> None:
        """Wait for a further frame of which `condition(pts, colour)` holds."""
        seen = len(self.frames)
        async with asyncio.timeout(LIMIT_S):
            while not any(condition(*each) for each in self.frames[seen:]):
                self.on_frame.clear()
                await self.on_frame.wait()

    async def after(self, start: int, wanted: dict[str, Any]) -> dict[str, Any]:
        """The first message from number `start` on that has all the wanted fields; waits for it."""
        return await self.message(wanted, start)


class Gate:
    """Lets engines start, one at a time: a FIFO that they read first."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    async def open(self) -> None:
        """Let the next one through."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
                    return
                except OSError:  # it has not come to the gate yet
                    await asyncio.sleep(0.02)


class Server:
    """`serve` in a process of its own, its complaints, and its viewers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.complaints = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.complaints += line

    def address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"https?://\S+/", line):
                return found.group(0)
        raise AssertionError(self.complaints)

    @property
    def engine(self) -> psutil.Process:
        """The engine process, or the launcher of its ranks."""
        children = fork_server.behind(self.process.pid).children()
        return min(children, key=psutil.Process.create_time)  # a spare is younger

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=await asyncio.to_thread(self.address), timeout=60) as http:
            yield http

    def close(self) -> int:
        """End it as Ctrl-C does; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(LIMIT_S)
        self._reader.join()
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def start(
    *options: str,
    program: tuple[str, str] = PAINTED,
    gate: Gate | None = None,
    python: str | None = None,
    descriptors: tuple[int, int] | None = None,
) -> Server:
    """`descriptors`: soft and hard limit, of the real interpreter only."""
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, descriptors)
    process = subprocess.Popen(
        [python or sys.executable, "-m", *program, "--no-browser", "--port", "0", *options],
        cwd=ROOT,
        env={**os.environ, **({"GATE": str(gate.path)} if gate else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if descriptors is None else limit,
    )
    return Server(process)


@asynccontextmanager
async def serving(*options: str, code: int | None = 0, **how: Any) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """A server and a client of it; ended as Ctrl-C does, with this exit code, unless None."""
    server = start(*options, **how)
    try:
        if gate := how.get("gate"):
            await gate.open()
        async with server.client() as http:
            yield server, http
    finally:
        ended = await asyncio.to_thread(server.close)
    assert code in (None, ended), server.complaints


async def stats(viewer: Watching, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The next statistics of which `wanted` holds."""
    async with asyncio.timeout(LIMIT_S):
        while not wanted(told := await viewer.after(len(viewer.messages), {"type": "stats"})):
            pass
    return told


@asynccontextmanager
async def watching(http: httpx.AsyncClient, session: str = "default") -> AsyncIterator[Watching]:
    """A viewer with a control channel."""
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    viewer = Watching(pc)
    receiver = pc.addTransceiver("video", direction="recvonly").receiver
    viewer.open_channel()
    await pc.setLocalDescription(await pc.createOffer())
    headers = {"Content-Type": "application/sdp"}
    answer = await http.post(f"/whep/{session}", content=pc.localDescription.sdp, headers=headers)
    assert answer.status_code == 201, answer.text
    await pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
    viewer.track, viewer.location, viewer.answer = receiver.track, answer.headers["location"], answer.text
    reading = asyncio.create_task(viewer.read())
    try:
        yield viewer
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await pc.close()


def near(colour: tuple[int, int, int], limit: int = 40) -> Any:
    return lambda pts, seen: max(abs(a - b) for a, b in zip(seen, colour, strict=True)) < limit


BLUE, GREEN = (40, 80, 220), (39, 160, 80)
FEWER_STEPS = (255, 255, 255)
"""The corner of pictures whose chunks have fewer steps than usual."""


async def change(http: httpx.AsyncClient, **message: Any) -> dict[str, Any]:
    answer = await http.post("/api/control", json=message)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()
    return receipt


async def test_viewers_stay_while_the_engine_is_killed_and_see_video_again(gate: Gate) -> None:
    async with serving(gate=gate) as (server, http):
        made = (await http.post("/api/sessions", json={"prompt": "green", "fps": 20, "seed": 5})).json()
        name, key = made["id"], {"Authorization": f"Bearer {made['control_token']}"}
        async with watching(http) as viewer, watching(http, name) as other:
            await change(http, type="reset", seed=7)
            before = await change(http, type="prompt", prompt="blue")
            await viewer.until_frame(near(BLUE))
            await other.until_frame(near(GREEN))
            fewer = await http.patch(f"/api/sessions/{name}", json={"steps": 2}, headers=key)
            assert fewer.status_code == 200, fewer.text
            await other.until_frame(near(FEWER_STEPS))
            assert (await http.post(f"/api/sessions/{name}/pause", headers=key)).status_code == 200
            last = (await stats(viewer, lambda told: True))["frame"]

            said = len(viewer.messages)
            server.engine.send_signal(signal.SIGKILL)
            state = await viewer.after(said, {"type": "state", "engine": "restarting"})
            assert "SIGKILL" in state["engine_reason"]
            await while_it_is_away(http, viewer)

            said = len(viewer.messages)
            await gate.open()
            state = await viewer.after(said, {"type": "state", "engine": "running"})
            assert {name: state[name] for name in ("prompt", "seed", "steps", "kv_context", "fps", "paused")} == {
                "prompt": "blue", "seed": 7, "steps": 4, "kv_context": "clean", "fps": 40.0, "paused": False,
            }  # fmt: skip
            await stats(viewer, lambda told: told["frame"] > last + 40)
            assert near(BLUE)(*viewer.frames[-1])
            times = [pts for pts, _ in viewer.frames]
            assert times == sorted(set(times)), "the viewer's clock never went back"
            after = await change(http, type="prompt", prompt="green")
            assert after["epoch"] >= before["epoch"] + 2, "the stream that began again has an epoch of its own"
            await viewer.until_frame(near(GREEN))

            there = (await http.get(f"/api/sessions/{name}", headers=key)).json()
            wanted = {"prompt": "green", "seed": 5, "steps": 2, "fps": 20.0, "paused": True}
            assert {field: there[field] for field in wanted} == wanted
            assert (await http.post(f"/api/sessions/{name}/resume", headers=key)).status_code == 200
            await stats(other, lambda told: told["made_fps"] > 0)
            assert near(FEWER_STEPS)(*other.frames[-1]), "the new engine makes them as the old one did last"
            assert (await http.get("/readyz")).status_code == 200
            for each in (viewer, other):
                assert each.pc.connectionState == "connected"
            assert "streamdiff_engine_restarts_total 1.0" in (await http.get("/metrics")).text


async def while_it_is_away(http: httpx.AsyncClient, viewer: Watching) -> None:
    """The engine waits at its gate: what is said meanwhile."""
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()["code"]) == (503, "restarting")
    assert "SIGKILL" in ready.json()["detail"] and int(ready.headers["retry-after"]) >= 1
    assert (await http.get("/healthz")).status_code == 200
    for path, body in (("/api/control", {"type": "pause"}), ("/api/sessions", {"prompt": "red"})):
        refused = await http.post(path, json=body)
        assert (refused.status_code, refused.json()["code"]) == (503, "restarting")
        assert int(refused.headers["retry-after"]) >= 1
    engine = (await http.get("/api/state")).json()["engine"]
    assert (engine["running"], "SIGKILL" in engine["reason"]) == (False, True)
    said = len(viewer.messages)
    viewer.channel.send('{"type": "prompt", "prompt": "red", "id": "lost"}')
    error = await viewer.after(said, {"type": "error", "id": "lost"})
    assert error["code"] == "restarting"
    assert viewer.pc.connectionState == "connected"
    async with watching(http) as late:
        hello = await late.after(0, {"type": "hello"})
        assert hello["state"]["engine"] == "restarting"
        await late.until_frame(near(BLUE))  # the last picture, for who joins as well
    seen = len(viewer.frames)
    await viewer.until_frame(near(BLUE))
    assert all(near(BLUE)(*frame) for frame in viewer.frames[seen:]), "the last picture is repeated"


async def test_an_engine_that_fails_again_and_again_is_given_up_and_the_server_says_so() -> None:
    async with serving("--name", "dies-1", "--restarts", "2", code=1) as (server, http):
        async with asyncio.timeout(LIMIT_S):
            while (ready := await http.get("/readyz")).json().get("code") != "engine":
                await asyncio.sleep(0.1)
        assert ready.status_code == 503
        assert "failed again after 2 restarts within 300 s" in ready.json()["detail"]
        assert "out of paint" in ready.json()["detail"]
        state = (await http.get("/api/state")).json()
        assert state["state"]["engine"] == "failed"
        control = await http.post("/api/control", json={"type": "pause"})
        assert (control.status_code, control.headers["retry-after"]) == (503, "5")
        assert "streamdiff_engine_restarts_total 2.0" in (await http.get("/metrics")).text
        assert server.process.poll() is None, "it stays and says why"
    assert "serve.max_restarts" in server.complaints and "/readyz answers 503" in server.complaints
    assert "Traceback" in server.complaints, "the engine's own"


async def test_while_the_model_loads_it_lives_is_not_ready_and_the_page_looks_again(gate: Gate) -> None:
    port = str(free_port())
    server = start("--port", port, gate=gate)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    with contextlib.suppress(httpx.ConnectError):  # it does not listen yet
                        alive = await http.get("/healthz")
                        break
                    await asyncio.sleep(0.05)
            assert (alive.status_code, alive.json()) == (200, {"alive": True})
            for path in ("/readyz", "/api/state"):
                answer = await http.get(path)
                assert (answer.status_code, answer.json()["code"]) == (503, "loading")
                assert answer.headers["retry-after"] == "1"
            assert (await http.post("/whep", content="v=0")).json()["code"] == "loading"
            page = await http.get("/")
            assert page.headers["refresh"] == "1" and "loading" in page.text
            assert "content-security-policy" in page.headers
            assert (await http.get("/", headers={"Host": "evil.example"})).status_code == 421
            steering = await SocketClient.connect(str(http.base_url), "/api/sessions/default/control")
            assert (steering.status, steering.problem["code"]) == (503, "loading")
            await steering.close()
            await gate.open()
            await asyncio.to_thread(server.address)
            async with asyncio.timeout(LIMIT_S):
                while (ready := await http.get("/readyz")).status_code != 200:
                    assert ready.json()["code"] == "opening"
            assert "refresh" not in (await http.get("/")).headers
    finally:
        code = await asyncio.to_thread(server.close)
    assert (code, server.complaints) == (0, "")


async def test_nothing_is_left_when_the_server_is_ended_while_an_engine_starts(gate: Gate) -> None:
    async with serving(gate=gate) as (server, http):
        first = server.engine
        first.send_signal(signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while (await http.get("/readyz")).json().get("code") != "restarting":
                await asyncio.sleep(0.05)
            while not (children := [c for c in fork_server.behind(server.process.pid).children() if c != first]):
                await asyncio.sleep(0.05)
    assert not children[0].is_running()


@pytest.mark.parametrize(
    "ring",
    [
        pytest.param((), marks=pytest.mark.soak, id="1"),
        pytest.param(("--stages", "2", "--kv-context", "staircase"), id="2"),
        pytest.param(("--parallel", "1x2"), marks=pytest.mark.soak, id="1x2"),
    ],
)
async def test_the_model_streams_again_after_a_process_of_its_engine_was_killed(ring: tuple[str, ...]) -> None:
    """The engine alone, or the second of two ranks, of a stage each or that share one, with the embedded model."""
    async with serving(*ring, program=MODEL) as (server, http), watching(http) as viewer:
        await change(http, type="prompt", prompt="a blue star at night")
        before = await stats(viewer, lambda told: told["frame"] >= 24)
        said = len(viewer.messages)
        [victim] = [server.engine] if not ring else [
            rank for rank in fork_server.behind(server.engine.pid).children() if rank.environ().get("RANK") == "1"
        ]  # fmt: skip
        victim.send_signal(signal.SIGKILL)
        state = await viewer.after(said, {"type": "state", "engine": "restarting"})
        assert ("rank 1 is gone" if ring else "SIGKILL") in state["engine_reason"]
        await viewer.after(said, {"type": "state", "engine": "running", "prompt": "a blue star at night"})
        await stats(viewer, lambda told: told["frame"] > before["frame"] + 48)
        times = [pts for pts, _ in viewer.frames]
        assert times == sorted(set(times))
        assert viewer.pc.connectionState == "connected"
        assert (await http.get("/readyz")).status_code == 200
        assert not victim.is_running()


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No private folder of any engine is left."""
    # Not below tmp_path: a socket's whole path has to fit into a hundred bytes.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield
        assert list(Path(folder).glob("streamdiff-*")) == []
