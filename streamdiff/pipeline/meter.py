"""How much work a chunk is, measured while the stream runs: what a server needs to know to say how many it can serve.

Sans-IO: the caller gives the time. Knows nothing about rings or sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

_LATEST = 16
_FEW = 4
"""Chunks below which a rank's share of the time says nothing yet."""


class Meter:
    """Counts the time in which there was something to do, and the chunks that came out of it: each as so many of the
    usual kind as it is work, so that the cost is that of one in the usual number of steps, whatever sessions have.

    On one rank that time per chunk is what a chunk costs, however many sessions take turns. In a ring it is more than
    that (stages wait for each other), so there the busiest rank's share of all time is taken instead.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._since_s: float | None = None
        self._busy = False
        self._busy_s = 0.0
        self._chunks = 0.0
        self._costs: deque[float] = deque(maxlen=_LATEST)

    def turn(self, now_s: float, busy: bool, chunks: Sequence[float]) -> None:
        """A turn ends: `busy` if there is something to do next, `chunks` were finished in it, each of which is so much
        work, 1 for the usual kind. Mutates: self."""
        if self._last_s is not None and self._busy:
            self._busy_s += now_s - self._last_s
        if self._since_s is None:
            self._since_s = now_s
        self._last_s, self._busy = now_s, busy
        for _ in chunks:
            self._costs.append(self._busy_s / sum(chunks))
        self._chunks += sum(chunks)
        if chunks:
            self._busy_s = 0.0

    def work_s(self, share: float | None, now_s: float) -> float | None:
        """Seconds per chunk of the usual kind; `share` is how much of the time since the first turn the busiest rank
        was at work, None with one rank. None before the first chunk."""
        if share is not None and self._since_s is not None and self._chunks >= _FEW:
            return share * (now_s - self._since_s) / self._chunks
        return median(self._costs) if self._costs else None
