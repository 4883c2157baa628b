"""How often something happens. Pure: the caller gives the time."""

from __future__ import annotations

from collections import deque

RATE_WINDOW_S = 2.0


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
