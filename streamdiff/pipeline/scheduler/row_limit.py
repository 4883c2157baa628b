"""How many rows the next forward takes where sessions share forwards. Pure logic, see
docs/decisions/0031-batching.md."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_GAIN = 1.02
"""How many times as much rows must bring together as each alone, or they stay apart."""


class RingSlots(NamedTuple):
    """Numbers of forwards that the ring can still take: slots that are `free`, slots `free_of_live` sessions' forwards,
    and `all` of them."""

    free: int
    free_of_live: int
    all: int


class RowsNow(NamedTuple):
    """Rows that wait at the head, and rows in the ring; rows that a chunk of every session takes in all."""

    ready: int
    in_ring: int
    chunks: int


@dataclass
class ForwardCounts:
    """Forwards handed out so far: by their number of rows, and those of one row by the reason why nothing shared them,
    where rows may: `none_ready`, no other row was; `ring`, the ring would have had too little to do; `cost`, two rows
    would not have paid; `same_session`, only rows of the same chunk were left; or the name of the field in
    which the other row differed."""

    rows: Counter[int] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)


class RowLimit:
    """Maximum rows for the next forward, at most `max_rows`, that neither idles a pipeline stage nor delays any
    session's chunks."""

    def __init__(self, max_rows: int, costs: Sequence[float] = ()) -> None:
        """`costs`: what forwards of 1, 2, ... `max_rows` rows take, each above 0, in any unit, on the slowest stage;
        without, further rows are taken to cost nothing."""
        self.max_rows = max_rows
        self.costs = tuple(cost / costs[0] for cost in costs)
        """Of forwards, relative to one of one row."""
        self.shares = any(self._gains(rows) for rows in range(2, max_rows + 1))
        """Whether any number of rows pays; where none does all is as with `max_rows` 1."""
        self._latest: dict[bool, deque[int]] = defaultdict(deque)

    def of(self, now: RowsNow, free: int, slots: int, background: bool = False) -> tuple[int, str]:
        """Maximum rows of the next forward, with `free` of the ring's `slots` free; and why it is only one.

        The rows that wait are spread over the free slots, so that none stays empty, and together with those in the ring
        over all slots, so that no forward takes so much longer than the others that these wait behind it. Of the
        numbers up to both it is the largest that pays. Forwards are of the same length as far as numbers allow: 3 and 2
        rows rather than 4 and 1.
        """
        together = now.ready + now.in_ring
        latest = self._latest[background]
        latest.append(together // slots)
        while len(latest) > slots:
            latest.popleft()
        possible = min(self.max_rows, now.ready // max(free, 1), *latest)
        most = next((rows for rows in range(possible, 1, -1) if self._pays(rows, now.chunks)), 1)
        if most > 1:
            return -(-together // -(-together // most)), "none_ready"
        return 1, "cost" if possible > 1 else "ring" if now.ready > 1 and self.max_rows > 1 else "none_ready"

    def _gains(self, rows: int) -> bool:
        """Whether so many rows take less time together than each alone."""
        return not self.costs or rows > LEAST_GAIN * self.costs[rows - 1]

    def _pays(self, rows: int, chunks: int) -> bool:
        """Whether with so many rows in a forward `chunks` rows, those of a chunk of every session, are through as soon
        as they would be one by one, also where the last forward is not full."""
        return not self.costs or (self._gains(rows) and -(-chunks // rows) * self.costs[rows - 1] <= chunks)
