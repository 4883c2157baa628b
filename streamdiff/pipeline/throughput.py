"""Compute seconds per chunk, measured while streams run: from it a server knows how many sessions it can serve. Also
how busy ranks are and how many sessions fit: a pipeline's own figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from streamdiff import clock

if TYPE_CHECKING:
    from streamdiff.core import ModelInfo
    from streamdiff.pipeline.planner.kv_budget import KVCacheBudget
    from streamdiff.pipeline.ring import Ring
    from streamdiff.pipeline.scheduler.row_limit import ForwardCounts
    from streamdiff.pipeline.worker_group import WorkerGroup

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

    Sans-IO: the caller gives the time. The busiest rank bounds the throughput. Idle time, and time in which ranks wait
    for each other, does not count.
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

    def chunk_compute_s(self) -> float | None:
        """Seconds of work in a chunk of the usual kind, of the busiest rank; None before the first, and before any rank
        has said that it worked."""
        first, last = self._marks[0], self._marks[-1]
        worked_s = max((b - a for a, b in zip(first.busy_s, last.busy_s, strict=True)), default=0.0)
        return worked_s / (last.chunks - first.chunks) if worked_s > 0 and last.chunks > first.chunks else None


class PipelineFigures:
    """What a pipeline says of itself: how busy its ranks are, what a chunk takes, how many sessions fit."""

    def __init__(self, info: ModelInfo, ring: Ring, workers: WorkerGroup | None, budget: KVCacheBudget | None) -> None:
        self._info, self._ring, self._workers, self._budget = info, ring, workers, budget
        self._meter = ChunkCostMeter(clock.monotonic_s(), self.busy_s())

    def occupancy(self) -> list[float]:
        """Share of the time since loading that each rank was at work, its decoding included; empty with one rank."""
        return self._workers.occupancy() if self._workers is not None else []

    def forwards(self) -> ForwardCounts:
        """Forwards that entered the ring, by their rows, and why rows went alone."""
        return self._ring.scheduler.counts

    def busy_s(self) -> list[float]:
        """Seconds that each rank's device was at work since its process began, decoding included where it is done."""
        return self._workers.busy_s() if self._workers is not None else [self._ring.worker.timer.busy_s]

    def chunk_compute_s(self) -> float | None:
        """Seconds of work in a chunk in the default number of steps, as the latest ones tell: of the busiest rank."""
        return self._meter.chunk_compute_s()

    def finished(self, costs: Sequence[float]) -> None:
        """Chunks were finished; `costs` as `ChunkCostMeter.finished` takes them. Mutates: self."""
        self._meter.finished(clock.monotonic_s(), self.busy_s(), costs)

    def max_sessions(self) -> int | None:
        """How many sessions of the default kind the memory for caches holds; None without a budget."""
        if self._budget is None:
            return None
        return self._budget.fits(steps=self._info.steps, kv_context=self._info.kv_context)

    def max_swapped_sessions(self) -> int | None:
        """How many of them may be swapped out; None: as many as one likes, as there is a disk to write to."""
        if self._budget is None or self._ring.stage.swaps.spills:
            return None
        return self._budget.away_count(steps=self._info.steps, kv_context=self._info.kv_context)

    def measure_from_here(self) -> None:
        """Restart the measurement, so that warm-up does not count. Mutates: self."""
        if self._workers is not None:
            self._workers.hear()
        self._meter = ChunkCostMeter(clock.monotonic_s(), self.busy_s())

    def measure_to_here(self) -> None:
        """Include the ranks' work until now, which they report only with heartbeats. Mutates: self."""
        if self._workers is not None:
            self._workers.hear()
            self._meter.finished(clock.monotonic_s(), self.busy_s(), [])
