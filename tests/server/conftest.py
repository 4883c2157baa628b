"""A running app in front of a real engine that paints, and WHEP viewers made of aiortc."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from streamdiff.config import Config, ServeConfig
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Command, Event, Ready, Shown
from streamdiff.server import main as server
from streamdiff.server.app import attach_engine, create_app
from streamdiff.server.app_state import AppState
from streamdiff.server.http_server import HttpServer
from streamdiff.server.media import pacer
from streamdiff.server.sessions.live_session import LiveSession
from tests.server.scripted import Painter

LIMIT_S = 240.0
"""Ends what hangs; a busy machine takes long."""


class InMemoryClient:
    """The real engine on a thread of this process: the client's end without sockets."""

    def __init__(self, painter: Painter, max_ahead_frames: int = 24, keep_bytes: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._engine = Engine(painter, max_ahead_frames, keep_bytes)
        self._lock = threading.Condition()
        self._commands: list[Command] = []
        self._stopping = False
        self._held = False
        self.ready: Ready = self._engine.ready()
        self.sent: list[Command] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                self._lock.wait_for(lambda: self._stopping or (not self._held and self.busy))
                commands, self._commands = self._commands, []
            events = [event for command in commands for event in self._engine.handle(command)]
            events += self._engine.step()
            for event in events:
                self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def send(self, command: Command) -> None:
        self.sent.append(command)
        with self._lock:
            self._commands.append(command)
            self._lock.notify()

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._events.get()) is not None:
            yield event

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile the engine takes no command."""
        self._hold(True)
        try:
            yield
        finally:
            self._hold(False)

    def _hold(self, held: bool) -> None:
        with self._lock:
            self._held = held
            self._lock.notify()

    async def inject(self, event: Event | None) -> None:
        """As if the engine had said it; None: it ends."""
        await self._events.put(event)

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to do."""
        return bool(self._commands) or self._engine.busy

    @property
    def shown(self) -> int:
        """The highest number of frames reported as shown."""
        return max((command.frames for command in self.sent if isinstance(command, Shown)), default=0)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()


@dataclass(eq=False)
class Peer:
    """A viewer made of aiortc."""

    pc: RTCPeerConnection
    location: str = ""
    answer: str = ""
    track: Any = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    channel: Any = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def open_channel(self) -> None:
        """A control channel, whose messages are kept. Mutates: self."""
        self.channel = self.pc.createDataChannel("control")

        @self.channel.on("message")  # type: ignore[untyped-decorator]
        def on_message(text: str) -> None:
            self.messages.append(json.loads(text))
            self.arrived.set()

    async def message(self, wanted: dict[str, Any], start: int = 0) -> dict[str, Any]:
        """The first message from number `start` on that has all the wanted fields; waits for it."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for message in self.messages[start:]:
                    if wanted.items() <= message.items():
                        return message
                self.arrived.clear()
                await self.arrived.wait()

    async def frame(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await self.track.recv()


def bearer(token: str | None) -> dict[str, str]:
    """The header that shows a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


VIEW, CONTROL = "a-token-to-watch-with", "a-token-to-steer-with"


def locked(folder: Path, **serve: Any) -> Config:
    """Of a server with a token to watch and one to steer, whose files are in `folder`."""
    (folder / "v").write_text(VIEW)
    (folder / "c").write_text(CONTROL)
    files = {"view_token_file": str(folder / "v"), "control_token_file": str(folder / "c")}
    return Config(serve=ServeConfig(**files, **serve))


@dataclass(eq=False)
class Site:
    """A running server."""

    base: str
    http: httpx.AsyncClient
    client: InMemoryClient
    state: AppState
    server: HttpServer
    peers: list[Peer] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        url = httpx.URL(self.base)
        assert url.port is not None
        return url.host, url.port

    @property
    def live(self) -> LiveSession:
        """The default session."""
        live = self.state.manager.get("default")
        assert live is not None
        return live

    async def offer(self, control: bool = True) -> Peer:
        """A peer with an offer, not yet sent."""
        pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        peer = Peer(pc)
        self.peers.append(peer)
        transceiver = pc.addTransceiver("video", direction="recvonly")
        peer.track = transceiver.receiver.track
        if control:
            peer.open_channel()

        @pc.on("track")
        def on_track(track: Any) -> None:
            peer.track = track

        await pc.setLocalDescription(await pc.createOffer())
        return peer

    async def post(
        self,
        peer: Peer,
        codec: str | None = None,
        session: str | None = None,
        token: str | None = None,
        client: str | None = None,
    ) -> httpx.Response:
        """Send a peer's offer and take the answer."""
        given = {"codec": codec, "session": session, "client": client}
        response = await self.http.post(
            "/whep",
            params={name: value for name, value in given.items() if value},
            content=peer.pc.localDescription.sdp,
            headers={"Content-Type": "application/sdp", **bearer(token)},
        )
        if response.status_code == 201:
            peer.location, peer.answer = response.headers["location"], response.text
            await peer.pc.setRemoteDescription(RTCSessionDescription(response.text, "answer"))
        return response

    async def watch(self, codec: str | None = None, session: str | None = None) -> Peer:
        """A connected viewer."""
        peer = await self.offer()
        response = await self.post(peer, codec, session)
        assert response.status_code == 201, response.text
        return peer

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` is true."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def open_site(
    config: Config | None = None, painter: Painter | None = None, host: str = "127.0.0.1", keep_bytes: int = 0
) -> AsyncIterator[Site]:
    """A server on a free port of this machine, in this process, that is asked over IPv4."""
    config = config or Config()
    client = InMemoryClient(painter or Painter(chunk_s=0.02), keep_bytes=keep_bytes)
    app = create_app(config)
    listener = server.listen(host, 0)
    http_server = HttpServer(app, config.serve)
    serving = asyncio.create_task(http_server.serve(sockets=[listener]))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_connections=None)
    try:
        async with (
            attach_engine(app, config, client) as state,
            httpx.AsyncClient(base_url=base, timeout=LIMIT_S, limits=limits) as http,
        ):
            site = Site(base, http, client, state, http_server)
            manager = state.manager
            await site.until(lambda: all(each.opened for each in manager.sessions) or manager.ended.is_set())
            try:
                yield site
            finally:
                await asyncio.gather(*(peer.pc.close() for peer in site.peers))
                http_server.should_exit = True
                await serving
    finally:
        http_server.should_exit = True
        await serving
        client.stop()


@pytest.fixture
def regular_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stamps are those of the media clock, also where the machine is so busy that they lag behind real time."""
    monkeypatch.setattr(pacer, "SLACK_S", 1000.0)


def in_slots(stamps: list[int], ticks: int) -> bool:
    """Whether frames are whole slots of so many ticks apart. A busy machine may skip a slot; a step is then two or
    more of them, never something in between."""
    steps = [after - before for before, after in pairwise(stamps)]
    return bool(steps) and all(step > 0 and step % ticks == 0 for step in steps)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Every test leaves as many threads as it found, but for asyncio's own helpers."""
    names = {"pacer", "encoder-h264", "encoder-vp8"}
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name in names]


def run_scene(
    scene: Callable[[Site], Awaitable[None]], config: Config | None = None, painter: Painter | None = None
) -> None:
    """Play `scene` on a server of its own."""

    async def main() -> None:
        async with open_site(config, painter) as site:
            await scene(site)

    asyncio.run(main())
