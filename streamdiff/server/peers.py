"""Who is at the other end, and how much of a limited number one of them may hold. Sans-IO."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address, ip_network
from math import ceil

from starlette.requests import HTTPConnection

from streamdiff.server.problem import Problem

RETRY_AFTER_S = 5


def address_of(connection: HTTPConnection) -> str:
    """Whom limits are counted for: the address of the client, as told by a trusted proxy where there is one."""
    return group_of(connection.client.host) if connection.client else ""


def group_of(address: str) -> str:
    """An IPv4 address as it is, the /64 network of an IPv6 one, since whoever has one address there has all of it."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, 64), strict=False))


def share_of(limit: int, share: float) -> int:
    """How many of `limit` one address may hold: one at least."""
    return max(1, ceil(limit * share))


class Places:
    """`limit` places, of which one address may hold `share`."""

    def __init__(self, limit: int, share: float, code: str, setting: str) -> None:
        """`code`: of the problem that all are taken. `setting`: what says how many there are, or what they are."""
        self._limit, self._per_address = limit, share_of(limit, share)
        self._code, self._setting = code, setting
        self._held: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Places that are taken."""
        return self._held.total()

    def refusal(self, address: str) -> Problem | None:
        """Why an address can have no place now, 503 or 429; None: it can."""
        again = {"Retry-After": str(RETRY_AFTER_S)}
        if self.count >= self._limit:
            message = f"All {self._limit} places are taken ({self._setting}). Try again in a moment."
            return Problem(503, message, again, code=self._code)
        if self._held[address] >= self._per_address:
            message = f"One address may hold {self._per_address} of {self._limit} places ({self._setting}), and yours "
            return Problem(
                429, message + "does: close another page, or raise serve.address_share.", again, code="address"
            )
        return None

    def take(self, address: str) -> None:
        """Take a place, whatever `refusal` says. Mutates: self."""
        self._held[address] += 1

    def leave(self, address: str) -> None:
        """Give a place back. Mutates: self."""
        self._held[address] -= 1
        if not self._held[address]:
            del self._held[address]
