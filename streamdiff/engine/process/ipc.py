"""The private folder that a web process shares with its engine: the configuration, the pipe that wakes a standby
process, and a pyzmq PAIR over ipc.

A configuration holds secrets (stream keys, TURN credentials), so it is never an argument of a process: everybody on the
machine can read those. Messages travel as JSON, with pictures and snapshots raw beside it.

Nothing here can pile up without limit. Both directions hold at most `HIGH_WATER` messages per side; then the web
side's `send` waits (its callers are held back), and the engine's `send` waits up to `stall_s` and then gives up,
because a web process that reads nothing for so long is broken. Pictures, the only large messages, are held to fewer
than that by back-pressure: a session makes at most `max_ahead_frames` frames beyond those reported in `Shown`.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from streamdiff.config import Config
from streamdiff.engine import messages
from streamdiff.engine.messages import Alive, Command, Event, Failed
from streamdiff.errors import EngineFailure, StreamdiffError

HIGH_WATER = 256
EXIT_CONFIG = 2
"""Exit code of an engine process that refuses its configuration; it has sent `Failed` with the reason."""
# The kernel's limit on the path of a local socket, the closing zero included, is 108 bytes on Linux, 104 elsewhere.
_MAX_PATH_BYTES = 103
_DRAIN_MS = 200
_CONFIG, _PIPE = "config.json", "begin"
_EVERYBODY = b"." * 1024
"""More than there are ranks, each of which reads one byte of the pipe."""
_OF_STREAMS: list[type] = [*messages.StreamCommand.__subclasses__(), *messages.StreamEvent.__subclasses__()]
_OF_THE_ENGINE: list[type] = [messages.Shutdown, messages.Ready, messages.LoadFigures, Alive, Failed]
KINDS: dict[str, type] = {kind.__name__: kind for kind in _OF_STREAMS + _OF_THE_ENGINE}
Part = bytes | memoryview
_BESIDE = "the shape of pictures whose bytes lie beside the header, or null: a file's content lies there"
"""Longer than any name in what a client sends."""


# ---- the folder ----------------------------------------------------------------------------------------------------


def make_folder(config: Config) -> Path:
    """A new folder (mode 0700) with the whole configuration, for the caller to remove."""
    folder = Path(tempfile.mkdtemp(prefix="streamdiff-"))
    write_config(folder, config)
    return folder


def write_config(folder: Path, config: Config) -> None:
    """Put the configuration there for `read_config`, readable by this user only. Raises FileExistsError."""
    descriptor = os.open(folder / _CONFIG, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(config.model_dump_json())


def read_config(folder: Path) -> Config:
    """The configuration that was put there."""
    return Config.model_validate_json((folder / _CONFIG).read_text(encoding="utf-8"))


def make_pipe(folder: Path) -> int:
    """Make the pipe that standby processes wait at; returns its descriptor, for `wake` and to close when they are
    stopped. Never blocks."""
    os.mkfifo(folder / _PIPE, 0o600)
    return os.open(folder / _PIPE, os.O_RDWR | os.O_NONBLOCK)


def open_pipe(folder: Path) -> int:
    """The other end; without O_NONBLOCK it would wait for a writer, who may be gone. Raises FileNotFoundError."""
    return os.open(folder / _PIPE, os.O_RDONLY | os.O_NONBLOCK)


def wake(pipe: int) -> None:
    """Wake every process that waits at the pipe, now or later."""
    os.write(pipe, _EVERYBODY)


# ---- messages as bytes ---------------------------------------------------------------------------------------------


class SerializationError(StreamdiffError):
    """Bytes that are not one of our messages: the two processes run different versions, or one has a fault."""


def encode(message: Command | Event) -> list[Part]:
    """Bytes of a message: a JSON header, and a part for each field of pictures or data: a view, not a copy."""
    parts: list[Part] = []

    def put_beside(value: Any) -> dict[str, object]:
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        if not isinstance(value, np.ndarray):
            parts.append(value)
            return {_BESIDE: None}
        parts.append(np.ascontiguousarray(value).data.cast("B"))
        return {_BESIDE: value.shape}

    header = json.dumps([type(message).__name__, vars(message)], default=put_beside)
    return [header.encode("ascii"), *parts]


def decode(parts: Sequence[Part]) -> Any:
    """The command or event in `parts`; pictures are a read-only view of their part, and data is the part itself.

    Raises:
        SerializationError: anything else.
    """
    beside = iter(parts[1:])

    def take_beside(value: dict[str, Any]) -> Any:
        if value.keys() != {_BESIDE}:
            return value
        data, shape = next(beside), value[_BESIDE]
        return data if shape is None else np.frombuffer(memoryview(data).toreadonly(), np.uint8).reshape(shape)

    try:
        kind, values = json.loads(bytes(parts[0]), object_hook=take_beside)
        return KINDS[kind](**{name: _frozen(value) for name, value in values.items()})
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        raise SerializationError(f"no message is {bytes(parts[0][:80])!r}: {error!r}") from error


def _frozen(value: object) -> object:
    """JSON's lists as tuples, of tuples too."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


# ---- the socket ----------------------------------------------------------------------------------------------------


def _endpoint(folder: Path) -> str:
    path = folder / "engine"
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise EngineFailure(
            f"the local socket {path} has a path of {len(os.fsencode(path))} bytes; the system allows "
            f"{_MAX_PATH_BYTES}. Point the environment variable TMPDIR at a folder with a shorter path."
        )
    return f"ipc://{path}"


def _limit(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)


class EngineServer:
    """The engine's end of the IPC socket, synchronous. For one thread."""

    def __init__(self, folder: Path, *, wake_fd: int | None = None, stall_s: float = 30.0) -> None:
        """Connect to the web process's end in `folder`.

        Args:
            wake_fd: a file descriptor that ends a waiting `poll` when it becomes readable. Never read here.
            stall_s: how long `send` may wait for a web process that does not read.
        """
        endpoint = _endpoint(folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _limit(self._socket)
        self._socket.setsockopt(zmq.SNDTIMEO, round(stall_s * 1000))
        self._stall_s = stall_s
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)

    def poll(self, timeout_s: float | None) -> list[Command]:
        """Every command that has arrived, in order; waits for the first one up to `timeout_s` (None: until one is
        there or `wake_fd` says so).

        Raises:
            SerializationError: something that is not a command.
        """
        commands: list[Command] = []
        ready = dict(self._poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000))))
        if self._socket not in ready:
            return commands
        while len(commands) < HIGH_WATER:
            try:
                commands.append(decode(self._socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return commands

    def send(self, event: Event) -> None:
        """Send `event` to the web process; the buffers of its pictures may be reused afterwards.

        Raises:
            EngineFailure: the web process has not read anything for `stall_s`.
        """
        try:
            self._socket.send_multipart(encode(event))
        except zmq.Again as error:
            message = f"the web process has read nothing for {self._stall_s:g} s; {HIGH_WATER} messages wait for it"
            raise EngineFailure(message) from error

    def close(self, *, linger_s: float = 1.0) -> None:
        """Close the socket, after waiting up to `linger_s` for sent messages to be delivered."""
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()


class EngineClient:
    """The web process's end of the IPC socket, asyncio. Created before the engine starts; ends with it."""

    def __init__(self, folder: Path) -> None:
        """Listen in `folder`, which should be private to the user (mode 0700)."""
        endpoint = _endpoint(folder)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _limit(self._socket)
        self._socket.bind(endpoint)
        self._sending = asyncio.Lock()
        self._failure_delivered = False
        self.heard = 0
        """Messages received so far: while it increases, the engine is alive."""
        self._end: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

    async def send(self, command: Command) -> None:
        """Send `command`; waits while the engine has `HIGH_WATER` commands to read.

        Raises:
            EngineFailure: the engine has ended.
        """
        parts = encode(command)
        # The lock keeps waiting senders out of pyzmq's own queue, which has no limit.
        async with self._sending:
            if self._end.done() or not await self._before_end(self._socket.send_multipart(parts)):
                failure = self._end.result()
                raise EngineFailure(failure.reason if failure else "the engine has ended; start it again")

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event in order, until the engine has ended, but `Alive`, which only counts. For one reader at a time.

        If the engine ended without being asked to, the last event is `Failed`, also when the engine could not send it.

        Raises:
            SerializationError: something that is not an event.
        """
        while (parts := await self._receive()) is not None:
            event: Event = decode([frame.buffer for frame in parts])
            self.heard += 1
            self._failure_delivered = self._failure_delivered or isinstance(event, Failed)
            if not isinstance(event, Alive):
                yield event
        failure = self._end.result()
        if failure is not None and not self._failure_delivered:
            self._failure_delivered = True
            yield failure

    async def _receive(self) -> list[zmq.Frame] | None:
        """The next message; None once the engine has ended and all that it sent is read."""
        if not self._end.done():
            receiving = asyncio.ensure_future(self._socket.recv_multipart(copy=False))
            if await self._before_end(receiving):
                return receiving.result()
        if self._socket.closed:
            return None
        # What the engine sent just before it ended may still be on its way through the socket.
        polling = asyncio.ensure_future(self._socket.poll(_DRAIN_MS))
        await asyncio.wait({polling})
        if polling.cancelled() or not polling.result():  # cancelled: `close` came in between
            return None
        return await self._socket.recv_multipart(copy=False)

    async def _before_end(self, work: Awaitable[object]) -> bool:
        """Wait for `work`; False when the engine ended first, and `work` is then cancelled."""
        task = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, self._end}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task.done() and not task.cancelled():
            task.result()
            return True
        return False

    def end(self, failure: Failed | None) -> None:
        """Mark the engine as ended (its `EngineProcess` does); `failure`: None if the end was requested."""
        if not self._end.done():
            self._end.set_result(failure)

    def close(self) -> None:
        """Close the socket; what was not delivered is dropped. `events` ends."""
        self.end(None)
        self._socket.close(linger=0)
        self._context.term()
