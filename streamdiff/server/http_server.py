"""uvicorn with a bounded number of connections, a time limit for requests, and a certificate that is read again when
its files change. Knows nothing about routes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.events import Ping

from streamdiff import clock
from streamdiff.config import PREFIX, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.server.peers import group_of, parse_address, share_of
from streamdiff.server.sessions.connection import MAX_BUFFERED_BYTES
from streamdiff.server.sessions.control import LARGEST_SNAPSHOT_BYTES, MAX_MESSAGE_BYTES

CERTIFICATE_TICKS = 100
"""Of a tenth of a second, after which the certificate's files are looked at again."""
STALLED_S = 2.0
"""A connection whose peer reads nothing of its answer for so long gives way to others."""
SPARE = 16
"""Connections above the limits, in which health is answered and nothing else."""
CUT_OFF_S = 5.0
"""After which a WebSocket that has ended is cut off, whatever its peer has not read yet."""
BACKLOG = 512
"""Connections that may wait to be accepted."""
ACCEPTS = 8
"""Connections accepted in a turn of the loop: those above the limits are closed in the next ones."""
FULL_AGAIN_S = 60.0
"""After which it is logged again that descriptors are used up."""
REQUEST_S = 10.0
"""Seconds within which a request's head, and then its body, has to arrive; of a larger body so many more that it may
come at BODY_BYTES_PER_S."""
BODY_BYTES_PER_S = 1_600_000
MAX_CONNECTIONS = 10_000
"""Open at the same time, where there are file descriptors for so many."""
Admission = Literal["served", "crowded", "refused"]
logger = logging.getLogger(__name__)


class Connections:
    """Open HTTP connections by address. WebSockets are counted where they are accepted.

    A connection above a limit replaces the oldest one that waits for a request, or else whose peer reads nothing of its
    answer: one of its own address where that holds its share, else one of the address that holds most. Trusted proxies
    hold as many as there are.
    """

    def __init__(self, limit: int, share: float, proxies: Sequence[str]) -> None:
        self._limit, self._per_address = limit, share_of(limit, share)
        self._proxies = [ip_network(each) for each in proxies]
        self._open: dict[str, dict[BoundedProtocol, None]] = {}  # of each address, the oldest first

    def add(self, connection: BoundedProtocol, host: str) -> Admission:
        """Count a connection; crowded: it may ask for health only; refused: it is not counted. Mutates: self."""
        own = self._open.get(group_of(host), {})
        over = 0 if self.is_proxy(host) else len(own) + 1 - self._per_address
        victim: BoundedProtocol | None = None
        if over > 0:
            victim = _idle(own)
        elif (over := sum(map(len, self._open.values())) + 1 - self._limit) > 0:
            by_address = sorted(self._open.values(), key=len, reverse=True)
            victim = _idle([each for address in by_address for each in address])
        if victim is not None:
            victim.end()
        elif over > SPARE:
            return "refused"
        self._open.setdefault(group_of(host), {})[connection] = None
        return "crowded" if over > 0 and victim is None else "served"

    def remove(self, connection: BoundedProtocol, host: str) -> None:
        """Forget a connection, if it is counted. Mutates: self."""
        own = self._open.get(group_of(host), {})
        own.pop(connection, None)
        if not own:
            self._open.pop(group_of(host), None)

    def is_proxy(self, host: str) -> bool:
        """Whether `host` is a trusted proxy."""
        address = parse_address(host)
        return address is not None and any(address in network for network in self._proxies)


def _idle(connections: Collection[BoundedProtocol]) -> BoundedProtocol | None:
    """The first of them that can go."""
    now_s = clock.monotonic_s()
    waiting = (each for each in connections if each.waiting)
    return next(waiting, None) or next((each for each in connections if each.stalled(now_s)), None)


class BoundedWebSocket(WSProtocol):
    """A WebSocket whose peer has to read what it makes the server send. uvicorn itself keeps answers to pings, and what
    is left when a connection ends, for as long as the peer likes."""

    def handle_ping(self, event: Ping) -> None:
        if self.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            self.transport.abort()
        else:
            super().handle_ping(event)

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self.loop.call_later(CUT_OFF_S, self.transport.abort)


class BoundedProtocol(H11Protocol):
    """One HTTP connection, closed when the head of a request, or then its body of up to `largest_bytes`, takes longer
    than it may to arrive (REQUEST_S).

    uvicorn itself has no limit. `waiting`: whether it waits for (the rest of) a request.
    """

    def __init__(self, *args: Any, connections: Connections, largest_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections, self._largest_bytes = connections, largest_bytes
        self._waits_for: object = None
        self._timer: asyncio.TimerHandle | None = None
        self._counted = False
        self._left: tuple[float, int] | None = None  # since when so many bytes wait for a peer that does not read

    @property
    def waiting(self) -> bool:
        return self._waits_for is not None

    def stalled(self, now_s: float) -> bool:
        """Whether the peer has read nothing of an answer for STALLED_S, as far as earlier calls saw. Mutates: self."""
        if self._left is None:
            return False
        if (left_bytes := self.transport.get_write_buffer_size()) < self._left[1]:
            self._left = now_s, left_bytes
        return now_s - self._left[0] > STALLED_S

    def pause_writing(self) -> None:
        super().pause_writing()
        self._left = clock.monotonic_s(), self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._left = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        admission = self._connections.add(self, self._host)
        if admission == "refused":
            transport.abort()
            return
        self._counted = True
        if admission == "crowded":
            self.app_state = {**self.app_state, "crowded": True}
        self._restart_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._restart_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_timer()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._uncount()  # it has limits of its own from here on
        super().handle_websocket_upgrade(event)

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None and self.scope["path"].endswith("/events"):  # which go on for ever by themselves
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._uncount()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close it at once."""
        self._uncount()
        self.transport.abort()

    @property
    def _host(self) -> str:
        return self.client[0] if self.client else ""

    def _restart_timer(self) -> None:
        """Start the time limit of what the connection waits for now. More bytes of the same do not extend it."""
        state = self.conn.their_state
        waits_for = state if self._counted and state in (h11.IDLE, h11.SEND_BODY) else None
        if waits_for is self._waits_for:
            return
        self._waits_for = waits_for
        if self._timer is not None:
            self._timer.cancel()
        limit_s = REQUEST_S
        if state is h11.SEND_BODY:
            length = next((int(value) for name, value in self.scope["headers"] if name == b"content-length"), 0)
            limit_s = max(REQUEST_S, min(length, self._largest_bytes) / BODY_BYTES_PER_S)
        self._timer = self.loop.call_later(limit_s, self._expire) if waits_for is not None else None

    def _expire(self) -> None:
        # Where the loop was busy, what has come meanwhile is in the socket still: one more turn of the loop reads it.
        self._timer = self.loop.call_later(0, self.end)

    def _uncount(self) -> None:
        self._counted = False
        self._restart_timer()
        self._connections.remove(self, self._host)


class Certificate:
    """A certificate chain and its key, PEM files. `context` is what connections are made with."""

    def __init__(self, cert: str, key: str) -> None:
        """
        Raises:
            ConfigError: a file that cannot be read or is no PEM, a key with a password, or that of another certificate.
        """
        self._cert, self._key = cert, key
        self._seen = self._files()
        self.context = self._loaded()

    def refresh(self) -> None:
        """Where the files have changed: new connections get the new certificate. One that cannot be used, as while
        somebody is replacing the files, is logged and changes nothing. Mutates: context."""
        if (files := self._files()) == self._seen:
            return
        self._seen = files
        try:
            self._loaded()  # apart, since a pair that does not fit would spoil the context in use
            self.context.load_cert_chain(self._cert, self._key, lambda: "")
        except (ConfigError, OSError) as error:
            logger.warning("The certificate stays as it was: %s", error)
        else:
            logger.info("New connections get the certificate that is in %s now.", self._cert)

    def _files(self) -> list[bytes] | None:
        """What is in both; None where one cannot be read at the moment."""
        with contextlib.suppress(OSError):
            return [Path(each).read_bytes() for each in (self._cert, self._key)]
        return None

    def _loaded(self) -> ssl.SSLContext:
        for name, path in (("tls_cert", self._cert), ("tls_key", self._key)):
            if not os.access(path, os.R_OK):
                raise ConfigError(f"serve.{name}: {path} does not exist, or cannot be read", field=f"serve.{name}")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # With an empty password: OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self._cert, self._key, lambda: "")
        except (ssl.SSLError, OSError) as error:
            why = "the key is that of another certificate" if "MISMATCH" in str(error) else "one of them is no PEM file"
            raise ConfigError(
                f"serve.tls_cert {self._cert} with serve.tls_key {self._key} cannot be used: {why}, or the key has a "
                "password. Give the certificate with its chain, and its key without a password.",
                field="serve.tls_cert",
            ) from error
        return context


class HttpServer(uvicorn.Server):
    """Serves an application on sockets that listen already, until `should_exit`.

    It leaves signals alone: ours also cover the time before and after it runs.
    """

    def __init__(self, app: ASGIApp, serve: ServeConfig, max_connections: int | None = None) -> None:
        """At most `max_connections` are open at once, else `MAX_CONNECTIONS`.

        Raises:
            ConfigError: a certificate that cannot be used.
        """
        self._certificate: Certificate | None = None  # plain HTTP
        self._full_s = -FULL_AGAIN_S
        if serve.tls_cert is not None and serve.tls_key is not None:
            self._certificate = Certificate(serve.tls_cert, serve.tls_key)
        proxies = [*serve.trusted_proxies, *map(_mapped, serve.trusted_proxies)]
        connections = Connections(max_connections or MAX_CONNECTIONS, serve.address_share, proxies)
        protocol = partial(BoundedProtocol, connections=connections, largest_bytes=LARGEST_SNAPSHOT_BYTES)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(type[H11Protocol], protocol),  # uvicorn calls it, no more
                backlog=ACCEPTS,  # asyncio's name for both; see `startup`
                log_config=None,  # it writes as we do
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                # By itself uvicorn believes what this machine's own programs say about who they speak for.
                proxy_headers=bool(serve.trusted_proxies),
                forwarded_allow_ips=proxies,
                ws=BoundedWebSocket,
                ws_max_size=2 * MAX_MESSAGE_BYTES,  # the answer to a message a little too long can still be given
                ws_per_message_deflate=False,
            )
        )
        self.config.load()
        self.config.loaded_app = _below_prefix(self.config.loaded_app, serve.root_path, connections.is_proxy)
        self.config.ssl = None if self._certificate is None else self._certificate.context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)
        asyncio.get_running_loop().set_exception_handler(self._report)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop's own; once a minute that no connection can be accepted, which asyncio tries again
        after a second. Mutates: self."""
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif clock.monotonic_s() - self._full_s >= FULL_AGAIN_S:
            self._full_s = clock.monotonic_s()
            logger.warning(
                "Connections wait: all file descriptors are in use (%s). Raise the limit (ulimit -n, LimitNOFILE), or "
                "lower serve.max_viewers.",
                error.strerror,
            )

    async def on_tick(self, counter: int) -> bool:
        if self._certificate is not None and counter % CERTIFICATE_TICKS == 0:
            self._certificate.refresh()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _mapped(network: str) -> str:
    """How an IPv4 network is called at a socket for IPv6 and IPv4."""
    found = ip_network(network)
    return f"::ffff:{found.network_address}/{96 + found.prefixlen}" if found.version == 4 else network


def _below_prefix(app: ASGIApp, root_path: str, is_proxy: Callable[[str], bool]) -> ASGIApp:
    """`app` with the path prefix of each request in its scope, as ASGI has it: `root_path`, or what a trusted proxy
    says instead. `path` begins with it, whether the proxy has taken it off or not."""

    async def with_prefix(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            client, path = scope.get("client"), scope["path"]
            prefix = (_forwarded_prefix(scope["headers"]) if client and is_proxy(client[0]) else "") or root_path
            if prefix:
                whole = path == prefix or path.startswith(f"{prefix}/")
                scope.update(root_path=prefix, path=path if whole else prefix + path)
        await app(scope, receive, send)

    return with_prefix


def _forwarded_prefix(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """X-Forwarded-Prefix; empty where it is missing, comes twice or is no plain path."""
    given = [value.decode("latin-1").strip() for name, value in headers if name == b"x-forwarded-prefix"]
    return given[0].rstrip("/") if len(given) == 1 and re.fullmatch(PREFIX, given[0]) else ""
