"""How often something happens, and how often it may; limits per client address: how many of something one may hold, and
how often it may ask. Sans-IO: the caller gives the time."""

from __future__ import annotations

from collections import Counter, deque
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from math import ceil

from starlette.requests import HTTPConnection

from streamdiff.server.problem import Unavailable

RETRY_AFTER_S = 5
MAX_ADDRESSES = 4096
RATE_WINDOW_S = 2.0


def address_of(connection: HTTPConnection) -> str:
    """Address that limits are counted for: the client's, which a trusted proxy forwards where there is one."""
    return group_of(connection.client.host) if connection.client else ""


def group_of(address: str) -> str:
    """The key for limits of an address: an IPv4 address itself, or the /64 network of an IPv6 address."""
    parsed = parse_address(address.partition("%")[0])
    if not isinstance(parsed, IPv6Address):
        return str(parsed or address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, 64), strict=False))


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """The IP address that `text` is; None: it is none."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def share_of(limit: int, share: float) -> int:
    """How many of `limit` one address may hold: one at least."""
    return max(1, ceil(limit * share))


class Rate:
    """Events per second over the last `RATE_WINDOW_S`. Sans-IO."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque()

    def add(self, count: int, now_s: float) -> None:
        """Count some events. Mutates: self."""
        self._events.append((now_s, count))
        self._trim(now_s)

    def per_s(self, now_s: float) -> float:
        """The rate now. Mutates: self."""
        self._trim(now_s)
        return sum(count for _, count in self._events) / RATE_WINDOW_S

    def _trim(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s - RATE_WINDOW_S:
            self._events.popleft()


class TokenBucket:
    """A bucket that fills with time: at most `per_s` a second, and `burst` at once. Sans-IO."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Use one, if there is one. Mutates: self."""
        if self._at_s is not None:
            self._left = min(self._burst, self._left + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class SlotPool:
    """`limit` slots, of which one address may hold `share`."""

    def __init__(self, limit: int, share: float, code: str, setting: str) -> None:
        """`code`: of the problem when all are taken. `setting`: key of the limit, or what the slots are for."""
        self._limit, self._per_address = limit, share_of(limit, share)
        self._code, self._setting = code, setting
        self._held: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Slots that are taken."""
        return self._held.total()

    def refusal(self, address: str, freed: str | None = None) -> Unavailable | None:
        """Why an address can have no slot now, 503 or 429; None: it can. `freed`: the address of one that goes."""
        if self.count - (freed is not None) >= self._limit:
            message = f"All {self._limit} places are taken ({self._setting}). Try again in a moment."
            return Unavailable(self._code, message, RETRY_AFTER_S)
        if self._held[address] - (freed == address) >= self._per_address:
            message = f"One address may hold {self._per_address} of {self._limit} places ({self._setting}), and yours "
            message += "does: close another page, or raise serve.address_share."
            return Unavailable("address", message, RETRY_AFTER_S, 429)
        return None

    def take(self, address: str) -> None:
        """Take a slot, whatever `refusal` says. Mutates: self."""
        self._held[address] += 1

    def release(self, address: str) -> None:
        """Give a slot back. Mutates: self."""
        self._held[address] -= 1
        if not self._held[address]:
            del self._held[address]


class PerAddressLimiter:
    """A `TokenBucket` for every address; the latest `MAX_ADDRESSES` are remembered."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._by_address: dict[str, TokenBucket] = {}

    def check(self, address: str, what: str, now_s: float) -> None:
        """Count one of `what`. Raises Problem: 429 for too many. Mutates: self."""
        if address not in self._by_address and len(self._by_address) >= MAX_ADDRESSES:
            del self._by_address[next(iter(self._by_address))]
        if not self._by_address.setdefault(address, TokenBucket(self._per_s, self._burst)).take(now_s):
            raise Unavailable("rate", f"Too many {what} in a short time from one address.", 1, 429)
