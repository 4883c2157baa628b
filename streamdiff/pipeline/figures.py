"""What a pipeline tells of its work: how busy its ranks are, what a chunk costs, how many sessions fit."""

from __future__ import annotations

from streamdiff import clock
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.output import ModelInfo
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget
from streamdiff.pipeline.scheduler.scheduler import ForwardCounts
from streamdiff.pipeline.throughput import ChunkCostMeter
from streamdiff.pipeline.worker_group import WorkerGroup


class TellsFigures:
    """What `StreamingPipeline` inherits for it."""

    info: ModelInfo
    ring: RingExecutor
    _workers: WorkerGroup | None
    _budget: KVCacheBudget | None
    _meter: ChunkCostMeter

    def occupancy(self) -> list[float]:
        """Share of the time since loading that each stage was at work, its decoding included; empty with one stage."""
        return self._workers.occupancy() if self._workers is not None else []

    def forwards(self) -> ForwardCounts:
        """Forwards that entered the ring, by their rows, and why rows went alone."""
        return self.ring.scheduler.counts

    def busy_s(self) -> list[float]:
        """Seconds that each rank's device was at work since its process began, decoding included where it is done."""
        return self._workers.busy_s() if self._workers is not None else [self.ring.worker.timer.busy_s]

    def work_s(self) -> float | None:
        """Seconds of work in a chunk in the default number of steps, as the latest ones tell: of the busiest rank."""
        return self._meter.work_s()

    def sessions_fit(self) -> int | None:
        """How many sessions of the default kind the memory for caches holds; None without a budget."""
        if self._budget is None:
            return None
        return self._budget.fits(steps=self.info.steps, kv_context=self.info.kv_context)

    def sessions_away(self) -> int | None:
        """How many of them may be swapped out; None: as many as one likes, as there is a disk to write to."""
        if self._budget is None or self.ring.stage.swaps.spills:
            return None
        return self._budget.away_count(steps=self.info.steps, kv_context=self.info.kv_context)

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
