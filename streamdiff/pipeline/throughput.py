"""Compute seconds per chunk, measured while streams run: from it a server knows how many sessions it can serve.

Sans-IO: the caller gives the time. Knows nothing about stages or sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_LATEST_S = 30.0
_SPACING_S = 1.0
_FEW = 4
"""Chunks that a measurement is made of at least, where there were so many."""


class _Mark(NamedTuple):
    """Totals at a time: chunks finished, and busy seconds of each rank."""

    at_s: float
    chunks: float
    busy_s: tuple[float, ...]


class ChunkCostMeter:
    """Estimates compute seconds per chunk over the latest half minute: busy time of the busiest rank divided by the
    chunks finished meanwhile, each scaled to the default step count.

    The busiest rank bounds the throughput. Idle time, and time in which ranks wait for each other, does not count.
    """

    def __init__(self, now_s: float, busy_s: Sequence[float]) -> None:
        """`busy_s`: busy seconds of each rank until now."""
        self._marks = deque([_Mark(now_s, 0.0, tuple(busy_s))])

    def finished(self, now_s: float, busy_s: Sequence[float], chunks: Sequence[float]) -> None:
        """`chunks` were finished, each of which is so much work, 1 for the usual kind; `busy_s` is how long each rank
        was at work in all. Mutates: self."""
        marks = self._marks
        mark = _Mark(now_s, marks[-1].chunks + sum(chunks), tuple(busy_s))
        if len(marks) > 2 and marks[-1].at_s - marks[-2].at_s < _SPACING_S:
            marks.pop()
        marks.append(mark)
        while len(marks) > 2 and marks[0].at_s < now_s - _LATEST_S and mark.chunks - marks[1].chunks >= _FEW:
            marks.popleft()

    def work_s(self) -> float | None:
        """Seconds of work in a chunk of the usual kind, of the busiest rank; None before the first, and before any rank
        has said that it worked."""
        first, last = self._marks[0], self._marks[-1]
        worked_s = max((b - a for a, b in zip(first.busy_s, last.busy_s, strict=True)), default=0.0)
        return worked_s / (last.chunks - first.chunks) if worked_s > 0 and last.chunks > first.chunks else None
