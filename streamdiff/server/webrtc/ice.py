"""STUN and TURN servers, with short-lived credentials, and the UDP ports of this server's own candidates.

The credentials are those of draft-uberti-behave-turn-rest, which coturn calls `use-auth-secret`: the user name is the
time at which they expire, the password its HMAC under a secret that only the two servers have.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hmac
import logging
import random
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from aiortc import RTCIceServer

from streamdiff import clock
from streamdiff.config import IceServer
from streamdiff.errors import ConfigError
from streamdiff.server.auth import read_setting_file
from streamdiff.server.webrtc.aiortc_compat import GATHER_S

logger = logging.getLogger(__name__)

CREDENTIAL_S = 3600
"""For which credentials are good. Who has joined stays: TURN servers look at the time only then."""
REST_S = 60.0
"""For which this server does without a STUN or TURN server that gave it no address."""


class IceServers:
    """The configured servers. Secrets are read once."""

    def __init__(self, servers: Sequence[IceServer], on_failure: Callable[[str], object] = lambda url: None) -> None:
        """`on_failure` gets the URL of a server that gave no address.

        Raises:
            ConfigError: a secret's file that cannot be read or is empty.
        """
        self._servers = [(_with_credential(server), _read(server, "secret_file")) for server in servers]
        self._on_failure = on_failure
        self._resting: dict[str, float] = {}  # until when

    def issue(self) -> list[IceServer]:
        """The servers for one viewer, each with a user name and a credential where it is a TURN server."""
        return [server if secret is None else _signed(server, secret) for server, secret in self._servers]

    def to_ask(self) -> list[RTCIceServer]:
        """The STUN and the TURN server that aiortc is to ask for addresses of this server: the first of each that does
        not rest, as it asks no others."""
        first: dict[str, IceServer] = {}
        for server in self.issue():
            if not server.url.startswith("stuns:") and self._resting.get(server.url, 0.0) <= clock.monotonic_s():
                first.setdefault(server.url[:4], server)
        return [RTCIceServer(each.url, each.username, each.credential) for each in first.values()]

    def take_answer(self, asked: Sequence[RTCIceServer], answer: str) -> None:
        """Let those rest that were asked and of which no address is in the SDP answer. Mutates: self."""
        now_s = clock.monotonic_s()
        for url in (str(server.urls) for server in asked):
            found = " typ relay" if url.startswith("turn") else " typ srflx"
            if found not in answer and self._resting.get(url, 0.0) <= now_s:
                self._resting[url] = now_s + REST_S
                self._on_failure(url)
                message = "%s gave no address within %g s: it is left out for %g s, and viewers get those there are."
                logger.warning(message, url, GATHER_S, REST_S)


def _with_credential(server: IceServer) -> IceServer:
    """The server, with the credential from its file if it has one."""
    if (credential := _read(server, "credential_file")) is None:
        return server
    try:
        return IceServer(url=server.url, username=server.username, credential=credential)
    except ValueError:
        file = f"serve.ice_servers: {server.url}: credential_file {server.credential_file}"
        raise ConfigError(f"{file} has blanks, quotes or backslashes in it; it holds one word") from None


def _read(server: IceServer, setting: Literal["secret_file", "credential_file"]) -> str | None:
    path: str | None = getattr(server, setting)
    name = f"serve.ice_servers: {server.url}: {setting}"
    if path is None:
        return None
    if not (secret := read_setting_file(path, name).strip()):
        what = "secret (coturn: static-auth-secret)" if setting == "secret_file" else "credential"
        raise ConfigError(f"{name} {path} is empty; it holds the TURN server's {what}")
    return secret


def _signed(server: IceServer, secret: str) -> IceServer:
    name = f"{round(clock.wall_s()) + CREDENTIAL_S}:{secrets.token_hex(4)}"
    digest = hmac.digest(secret.encode(), name.encode(), "sha1")
    return IceServer(url=server.url, username=name, credential=base64.b64encode(digest).decode())


class UdpPortLoop(asyncio.SelectorEventLoop):
    """Binds a UDP socket that asks for any port to one of `ports`. Sockets with a peer, as a TURN client's, are left
    alone: they only call out."""

    def __init__(self, ports: range) -> None:
        super().__init__()
        self._ports = ports
        self.in_use = False
        """Whether the last attempt found all of `ports` taken."""

    async def create_datagram_endpoint(
        self,
        protocol_factory: Any,
        local_addr: tuple[str, int] | str | None = None,
        remote_addr: tuple[str, int] | str | None = None,
        **options: Any,
    ) -> tuple[asyncio.DatagramTransport, Any]:
        """As asyncio's.

        Raises:
            OSError: EADDRINUSE where all ports of the range are taken at that address.
        """
        create = super().create_datagram_endpoint
        if not isinstance(local_addr, tuple) or local_addr[1] != 0 or remote_addr is not None:
            return await create(protocol_factory, local_addr, remote_addr, **options)
        # Not the lowest free one: what still comes for a viewer that has just left is not for the next.
        for port in random.sample(self._ports, len(self._ports)):
            try:
                made = await create(protocol_factory, (local_addr[0], port), None, **options)
                self.in_use = False
                return made
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
        self.in_use = True
        raise OSError(errno.EADDRINUSE, f"all UDP ports from {self._ports[0]} to {self._ports[-1]} are in use")


def ports_are_in_use() -> bool:
    """Whether the running loop has ports of a range, and found all of them taken."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, UdpPortLoop) and loop.in_use
