"""How often something happens, and how often it may. Pure: the caller gives the time."""

from __future__ import annotations

from collections import deque

RATE_WINDOW_S = 2.0
MAX_ADDRESSES = 4096


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


class PerAddressLimiter:
    """An `TokenBucket` for every address; of those heard of, `MAX_ADDRESSES` are remembered. Sans-IO."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._by_address: dict[str, TokenBucket] = {}

    def of(self, address: str) -> TokenBucket:
        """The address's own. Mutates: self."""
        if address not in self._by_address and len(self._by_address) >= MAX_ADDRESSES:
            del self._by_address[next(iter(self._by_address))]
        return self._by_address.setdefault(address, TokenBucket(self._per_s, self._burst))
