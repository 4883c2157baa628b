"""A WebSocket client of wsproto on a plain socket, that reads only when asked to."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import wsproto
from wsproto import events


@dataclass(eq=False)
class SocketClient:
    """One connection; `status` is 101 once it is open, else that of the refusal, whose body is `problem`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: wsproto.WSConnection
    status: int = 0
    subprotocol: str | None = None
    problem: dict[str, Any] = field(default_factory=dict)
    closed: int | None = None
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    _text: str = ""
    _body: bytes = b""

    @classmethod
    async def connect(
        cls, base: str, path: str, *, headers: dict[str, str] | None = None, protocols: tuple[str, ...] = (),
        receive_bytes: int | None = None, to: tuple[str, int] | None = None,
    ) -> SocketClient:  # fmt: skip
        """Open a connection to `path` at `base`. `receive_bytes`: what the kernel takes in unread.
        `to`: where `base` is, whatever it is called."""
        url = urlsplit(base)
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, to or (url.hostname, url.port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=4096 if receive_bytes else 2**16)
        client = cls(reader, writer, wsproto.WSConnection(wsproto.ConnectionType.CLIENT))
        request = events.Request(
            host=url.netloc,
            target=path,
            subprotocols=list(protocols),
            extra_headers=[(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        )
        writer.write(client.protocol.send(request))
        while not client.status:
            await client._feed()
        while client.status != 101 and not client.problem:
            await client._feed()
        return client

    async def _feed(self) -> None:
        data = await self.reader.read(65536)
        self.protocol.receive_data(data or None)
        for event in self.protocol.events():
            match event:
                case events.AcceptConnection():
                    self.status, self.subprotocol = 101, event.subprotocol
                case events.RejectConnection():
                    self.status = event.status_code
                case events.RejectData():
                    self._body += event.data
                    self.problem = json.loads(self._body) if event.body_finished else {}
                case events.TextMessage():
                    self._text += event.data
                    if event.message_finished:
                        self._waiting.append(json.loads(self._text))
                        self._text = ""
                case events.Ping():
                    self.writer.write(self.protocol.send(event.response()))
                case events.CloseConnection():
                    self.closed = event.code
                case _:
                    pass

    def send(self, message: dict[str, Any] | str | bytes) -> None:
        """Send one message."""
        data = json.dumps(message) if isinstance(message, dict) else message
        self.writer.write(self.protocol.send(events.Message(data=data)))

    async def message(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """The next message that has all the wanted fields; those before it are dropped."""
        async with asyncio.timeout(240):
            while True:
                while self._waiting:
                    message = self._waiting.pop(0)
                    if wanted.items() <= message.items():
                        return message
                assert self.closed is None, f"closed with {self.closed}"
                await self._feed()

    async def until_closed(self) -> int:
        """Read until the server ends it; the code."""
        async with asyncio.timeout(240):
            while self.closed is None:
                await self._feed()
            return self.closed

    async def close(self) -> None:
        """Hang up without a word."""
        self.writer.close()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)
