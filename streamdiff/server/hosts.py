"""By which names the server may be called: the check of the Host header that keeps DNS rebinding out.

A page whose name is made to point at this machine is, to the browser, of the same origin as this server. Its name in
the Host header gives it away. An address cannot be made to point elsewhere, so addresses are fine without being listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

from streamdiff.config import ServeConfig
from streamdiff.server.problem import Problem

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{0,5})?")
_SHOWN = 80
"""Characters of a name that are repeated to whoever sent it."""


class HostPolicy:
    """Accepts `localhost`, any IP address, and the names it is given, in any case and with any port."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", *(_plain(name) for name in names)}

    @classmethod
    def of(cls, config: ServeConfig) -> HostPolicy:
        """What `serve.host` and `server.hosts` name."""
        return cls([config.host, *config.hosts])

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Check a request's headers (names in lower case).

        Raises:
            Problem: 400 without exactly one well-formed Host header, 421 for another server's name.
        """
        given = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(given) != 1:
            raise Problem(400, f"A request has one Host header; this one has {len(given)}.", code="host")
        found = _HOST.fullmatch(given[0])
        if found is None or (found["v6"] is not None and not _is_v6(found["v6"])):
            raise Problem(400, f"The Host header {given[0][:_SHOWN]!r} is no name or address.", code="host")
        name = found["name"]
        if name is None or _is_address(name) or _plain(name) in self._names:
            return
        shown = name[:_SHOWN]
        message = f"This server is not known as {shown!r}. If it should be: --allowed-host {shown}, or serve.hosts."
        raise Problem(421, message, code="host")


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_v6(text: str) -> bool:
    return _is_address(text) and isinstance(ip_address(text), IPv6Address)
