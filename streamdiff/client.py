"""A server elsewhere, from Python: its sessions, prompts, controls, events and frames.

    with Client("http://gpu:8000", token="...") as client, client.open("a red circle over a meadow") as stream:
        for number, frame in zip(range(200), stream.frames()):  # numpy uint8 [H, W, 3]
            if number == 100:
                stream.prompt("a blue star at night")

`AsyncClient` is the same with `await` and `async for`. Frames come over WHEP (UDP), messages over a WebSocket, which
takes the extra `client`, the rest over HTTP. Every call raises RequestError for what the server refuses, with its field
and code, and StreamdiffError where it does not answer or cannot now.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, suppress
from functools import partial, wraps
from itertools import count
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

import httpx
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numpy.typing import NDArray

from streamdiff.errors import RequestError, StreamdiffError
from streamdiff.heavy_import import optional

Frame = NDArray[np.uint8]
"""One picture: uint8 `[H, W, 3]`, RGB."""
Message = dict[str, Any]
"""A JSON object, as docs/serving.md has it."""
Stage = Literal["accepted", "applied", "shown"]
_T = TypeVar("_T")
_P = ParamSpec("_P")
_R = TypeVar("_R")

URL = "http://127.0.0.1:8000"
SAY_AGAIN_S = 0.3
"""How often controls that are held are said again: a server lets go after a second of silence."""
TIMEOUT_S = 60.0
_KEPT_FRAMES, _KEPT_EVENTS = 8, 1000


def _check(status: int, body: bytes) -> None:
    """Raises for an answer that is a problem document: RequestError, or from 500 on StreamdiffError."""
    if status < 400:
        return
    told = {"detail": f"the answer is {status}: {body[:200].decode(errors='replace')}"}
    with suppress(ValueError, TypeError):
        told |= json.loads(body)
    field, code = told.get("field", ""), told.get("code", "")
    if status >= 500:
        raise StreamdiffError(told["detail"], field=field, code=code)
    raise RequestError(field, told["detail"], code)


def _bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _put(queue: asyncio.Queue[_T], item: _T) -> None:
    """Put an item, in place of the oldest where the queue is full. Mutates: queue."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """A server at `url`; `token` is one that it knows."""

    def __init__(self, url: str = URL, token: str | None = None) -> None:
        self.url, self.token = url.rstrip("/"), token
        self._http = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, headers=_bearer(token))

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def request(self, /, method: str, path: str, **given: Any) -> httpx.Response:
        """Any request; `given` is as in httpx."""
        try:
            response = await self._http.request(method, path, **given)
        except httpx.TransportError as error:
            why = f"{self.url} does not answer: {error or type(error).__name__}"
            raise StreamdiffError(why, code="unreachable") from error
        _check(response.status_code, response.content)
        return response

    async def open(self, prompt: str | None = None, **more: Any) -> AsyncRemoteStream:
        """A new session, which ends with its stream; None: the server's own prompt. `more`: other fields of
        `POST /api/sessions`, such as seed, steps and fps."""
        fields = more if prompt is None else more | {"prompt": prompt}
        return AsyncRemoteStream(self, (await self.request("POST", "api/sessions", json=fields)).json(), owned=True)

    async def session(self, id: str = "default", token: str | None = None) -> AsyncRemoteStream:
        """A session that is open already; `token` is its own, to watch or to steer."""
        info = (await self.request("GET", f"api/sessions/{id}", headers=_bearer(token))).json()
        return AsyncRemoteStream(self, info | {"control_token": token}, owned=False)


class AsyncRemoteStream(AbstractAsyncContextManager["AsyncRemoteStream"]):
    """A session of a server. One that `AsyncClient.open` opened ends with it; of others it only takes leave."""

    def __init__(self, client: AsyncClient, info: Message, owned: bool) -> None:
        self.id: str = info["id"]
        self.state: Message = {}
        """The newest that its server told; empty before the first message."""
        self._client, self._owned, self._shown = client, owned, _bearer(info.get("control_token"))
        self._numbers, self._connecting = count(1), asyncio.Lock()
        self._socket: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[Any, tuple[Stage, asyncio.Future[Message]]] = {}
        self._listeners: set[asyncio.Queue[Message | None]] = set()
        self._held: dict[str, float] = {}

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Take leave; end the session, if this opened it. Mutates: self."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        if self._owned:
            self._owned = False
            await self.request("DELETE")

    async def request(self, /, method: str, path: str = "", **given: Any) -> httpx.Response:
        """A request below the session's address; `given` is as in httpx."""
        return await self._client.request(method, f"api/sessions/{self.id}{path}", headers=self._shown, **given)

    async def picture(self) -> bytes:
        """The frame on show, a JPEG file."""
        return (await self._client.request("GET", f"frame.jpg?session={self.id}", headers=self._shown)).content

    # ---- messages -------------------------------------------------------------------------------------------------

    async def ask(self, kind: str, /, until: Stage = "accepted", **fields: Any) -> Message:
        """Send a control message and wait: of a change, for the receipt of this stage, or that something newer has
        superseded it; of `get`, `ping` and `wheel`, for what they are answered."""
        await self._connect()
        id = f"c{next(self._numbers)}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[id] = until, answer
        try:
            with suppress(self._broken):  # what waits fails then, this too
                await self._socket.send(json.dumps({"type": kind, "id": id, **fields}))
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            text = f"Session {self.id} gave no receipt {until!r} in {TIMEOUT_S:g} s; a frame is shown to viewers only."
            raise StreamdiffError(text, code="timeout") from None
        finally:
            del self._waiting[id]

    async def prompt(self, text: str, switch: str | None = None, over: int = 1, until: Stage = "accepted") -> Message:
        """Show something else; the receipt. `switch`: what it does to the past; `over`: chunks that it comes over."""
        return await self.ask("prompt", until, prompt=text, switch=switch, over=over)

    async def control(self, until: Stage = "accepted", /, **values: float) -> Message:
        """Hold controls of the model, by name: -1 to 1, a button 0 or 1; others stay as they are. They are held until
        they are set to 0, or this is closed."""
        before, self._held = self._held, {name: value for name, value in (self._held | values).items() if value}
        try:
            return await self.ask("control", until, axes=values)
        except RequestError:
            self._held = before
            raise

    async def events(self) -> AsyncGenerator[Message, None]:
        """What the server tells from now on: `state` after each change, `stats` twice a second, receipts; until the
        session ends."""
        await self._connect()
        queue: asyncio.Queue[Message | None] = asyncio.Queue(_KEPT_EVENTS)
        self._listeners.add(queue)
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._listeners.discard(queue)

    async def _connect(self) -> None:
        """The WebSocket, connected once. Mutates: self."""
        async with self._connecting:
            if self._socket is not None:
                return
            websockets = optional("websockets", "client", "Messages to a session")
            url = f"ws{self._client.url.removeprefix('http')}/api/sessions/{self.id}/control"
            self._broken = websockets.ConnectionClosed
            try:
                self._socket = await websockets.connect(
                    url, additional_headers=_bearer(self._client.token) | self._shown
                )
            except websockets.InvalidStatus as error:
                _check(error.response.status_code, error.response.body)
            except (OSError, websockets.WebSocketException) as error:
                raise StreamdiffError(f"{url} does not answer: {error}", code="unreachable") from error
            self._tasks |= {asyncio.create_task(self._read()), asyncio.create_task(self._hold())}

    async def _read(self) -> None:
        with suppress(self._broken):
            async for text in self._socket:
                self._take(json.loads(text))
        self._socket = None
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(StreamdiffError(f"The connection to session {self.id} ended.", code="ended"))
        for queue in self._listeners:
            _put(queue, None)

    def _take(self, message: Message) -> None:
        """Mutates: self."""
        kind, stage = message["type"], message.get("stage")
        if kind in ("hello", "state"):
            self.state = message.get("state", message)
        for queue in self._listeners:
            _put(queue, message)
        until, answer = self._waiting.get(message.get("id"), ("", None))
        if answer is None or answer.done():
            return
        if kind == "error" or stage == "refused":
            why, code = message.get("message") or message.get("reason", ""), message.get("code", "refused")
            answer.set_exception(RequestError(message.get("field", ""), why, code))
        elif kind != "receipt" or stage in (until, "superseded"):
            answer.set_result(message)

    async def _hold(self) -> None:
        """Say again what is held, while there is a connection."""
        with suppress(self._broken):
            while self._socket is not None:
                if self._held:
                    await self._socket.send(json.dumps({"type": "control", "axes": self._held}))
                await asyncio.sleep(SAY_AGAIN_S)

    # ---- frames ---------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Watch: frames as they are shown, until the session ends. Who takes them more slowly misses the oldest of
        those that wait."""
        from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
        from aiortc.mediastreams import MediaStreamError

        pc, queue = RTCPeerConnection(RTCConfiguration(iceServers=[])), asyncio.Queue[Any](_KEPT_FRAMES)
        receiver = pc.addTransceiver("video", direction="recvonly").receiver

        async def receive() -> None:
            with suppress(MediaStreamError):
                while True:
                    _put(queue, await receiver.track.recv())
            _put(queue, None)

        pc.on("connectionstatechange", lambda: _put(queue, None) if pc.connectionState == "failed" else None)
        async with AsyncExitStack() as ends:
            ends.push_async_callback(pc.close)
            await pc.setLocalDescription(await pc.createOffer())
            offer, headers = pc.localDescription.sdp, self._shown | {"Content-Type": "application/sdp"}
            answer = await self._client.request("POST", f"whep/{self.id}", headers=headers, content=offer)
            await pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
            ends.callback(asyncio.create_task(receive()).cancel)
            while (frame := await queue.get()) is not None:
                yield frame.to_ndarray(format="rgb24")
            if pc.connectionState == "failed":
                raise StreamdiffError(f"No video comes from {self._client.url}: UDP may be blocked", code="connection")


# ---- without asyncio ----------------------------------------------------------------------------------------------


class _Blocking(AbstractContextManager[Any], Generic[_T]):
    """An object of asyncio, whose methods wait: they run in the loop of `portal`, on a thread of its own."""

    def __init__(self, portal: BlockingPortal, of: _T) -> None:
        self._portal, self._of = portal, of


def _waits(method: Callable[Concatenate[_T, _P], Awaitable[_R]]) -> Callable[Concatenate[_Blocking[_T], _P], _R]:
    @wraps(method)
    def wait(self: _Blocking[_T], /, *given: _P.args, **named: _P.kwargs) -> _R:
        return self._portal.call(partial(method, self._of, *given, **named))

    return wait


def _iterates(method: Callable[[_T], AsyncGenerator[_R, None]]) -> Callable[[_Blocking[_T]], Iterator[_R]]:
    @wraps(method)
    def iterate(self: _Blocking[_T], /) -> Iterator[_R]:
        items = method(self._of)
        try:
            while (item := self._portal.call(partial(anext, items, None))) is not None:
                yield item
        finally:
            self._portal.call(items.aclose)

    return iterate


class RemoteStream(_Blocking[AsyncRemoteStream]):
    """`AsyncRemoteStream` for programs without asyncio."""

    request = _waits(AsyncRemoteStream.request)
    picture = _waits(AsyncRemoteStream.picture)
    ask = _waits(AsyncRemoteStream.ask)
    prompt = _waits(AsyncRemoteStream.prompt)
    control = _waits(AsyncRemoteStream.control)
    close = _waits(AsyncRemoteStream.close)
    events = _iterates(AsyncRemoteStream.events)
    frames = _iterates(AsyncRemoteStream.frames)

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(_Blocking[AsyncClient]):
    """`AsyncClient` for programs without asyncio."""

    def __init__(self, url: str = URL, token: str | None = None) -> None:
        self._thread = start_blocking_portal()
        super().__init__(self._thread.__enter__(), AsyncClient(url, token))

    request = _waits(AsyncClient.request)

    def open(self, prompt: str | None = None, **more: Any) -> RemoteStream:
        """As `AsyncClient.open`."""
        return RemoteStream(self._portal, self._portal.call(partial(self._of.open, prompt, **more)))

    def session(self, id: str = "default", token: str | None = None) -> RemoteStream:
        """As `AsyncClient.session`."""
        return RemoteStream(self._portal, self._portal.call(self._of.session, id, token))

    def __exit__(self, *_: object) -> None:
        self._portal.call(self._of.__aexit__)
        self._thread.__exit__(None, None, None)
