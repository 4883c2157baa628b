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
from typing import Literal

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
        self._servers = [(_with_credential(server), _read(server, "secret_file")) for server in servers]

    def issue(self) -> list[IceServer]:
        """The servers for one viewer, each with a user name and a credential where it is a TURN server."""
        return [server if secret is None else _signed(server, secret) for server, secret in self._servers]


def _with_credential(server: IceServer) -> IceServer:
    """The server, with the credential from its file if it has one."""
    if (credential := _read(server, "credential_file")) is None:
        return server
    try:
        return IceServer(url=server.url, username=server.username, credential=credential.decode())
    except ValueError:
        file = f"serve.ice_servers: {server.url}: credential_file {server.credential_file}"
        raise ConfigError(f"{file} has blanks, quotes or backslashes in it; it holds one word") from None


def _read(server: IceServer, setting: Literal["secret_file", "credential_file"]) -> bytes | None:
    path: str | None = getattr(server, setting)
    name = f"serve.ice_servers: {server.url}: {setting} {path}"
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    if not secret:
        what = "secret (coturn: static-auth-secret)" if setting == "secret_file" else "credential"
        raise ConfigError(f"{name} is empty; it holds the TURN server's {what}")
    return secret


def _signed(server: IceServer, secret: bytes) -> IceServer:
    name = f"{round(clock.wall_s()) + CREDENTIAL_S}:{secrets.token_hex(4)}"
    digest = hmac.digest(secret, name.encode(), "sha1")
    return IceServer(url=server.url, username=name, credential=base64.b64encode(digest).decode())
