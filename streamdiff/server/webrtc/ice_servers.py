"""STUN and TURN servers that are sent to viewers, with credentials of their own where a TURN server checks them.

The credentials are those of draft-uberti-behave-turn-rest, which coturn calls `use-auth-secret`: the user name is the
time at which they expire, the password its HMAC under a secret that only the two servers have.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path

from aiortc import RTCIceServer

from streamdiff import clock
from streamdiff.config import IceServer
from streamdiff.errors import ConfigError

CREDENTIAL_S = 3600
"""For which credentials are good. Who has joined stays: TURN servers look at the time only then."""


class IceServers:
    """The configured servers. Secrets are read once."""

    def __init__(self, servers: Sequence[IceServer]) -> None:
        """
        Raises:
            ConfigError: a secret's file that cannot be read or is empty.
        """
        self._servers = [(server, _secret(server)) for server in servers]

    def issue(self) -> list[IceServer]:
        """The servers for one viewer, each with a user name and a credential where it is a TURN server."""
        return [server if secret is None else _signed(server, secret) for server, secret in self._servers]

    def for_aiortc(self) -> list[RTCIceServer]:
        """The same for a connection of this server's own."""
        return [RTCIceServer(each.url, each.username, each.credential) for each in self.issue()]


def _secret(server: IceServer) -> bytes | None:
    path, name = server.secret_file, f"serve.ice_servers: {server.url}: secret_file {server.secret_file}"
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    if not secret:
        raise ConfigError(f"{name} is empty; it holds the TURN server's secret (coturn: static-auth-secret)")
    return secret


def _signed(server: IceServer, secret: bytes) -> IceServer:
    name = f"{round(clock.wall_s()) + CREDENTIAL_S}:{secrets.token_hex(4)}"
    digest = hmac.digest(secret, name.encode(), "sha1")
    return IceServer(url=server.url, username=name, credential=base64.b64encode(digest).decode())
