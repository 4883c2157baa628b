"""What may enter the ring next: rank 0's receiver, which the scheduler supplies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from streamdiff import clock
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate, StageMessage
from streamdiff.pipeline.runner.sampler import Finished, LatentSampler
from streamdiff.pipeline.scheduler.scheduler import Places, StreamBatchScheduler
from streamdiff.pipeline.scheduler.step import MicroStep


class InFlightQueue:
    """Rank 0's `Receiver`: session updates first, in the order they were given, then what the scheduler hands out.

    At most `limit` messages are in the ring at once, updates included. Every link has two slots, so the ring can never
    fill up and stand still. A background session's forward enters only where a stage would have nothing to do. Rows
    that could enter wait up to `wait_s` for others to share their forward.
    """

    def __init__(
        self,
        scheduler: StreamBatchScheduler,
        sampler: LatentSampler,
        limit: int,
        timer: DeviceTimer,
        wait_s: float = 0.0,
    ) -> None:
        self.scheduler, self.sampler, self.limit, self.wait_s = scheduler, sampler, limit, wait_s
        self._held_since_s: float | None = None
        self._timed = timer.stream()
        self.controls: deque[StageMessage] = deque()
        self.in_ring: deque[StageMessage] = deque()  # in the ring, in order, without their tensors
        self.stopping = False
        self.swapped_in: deque[SessionUpdate] = deque()
        """What has come back of SWAP_IN."""

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        """The next message that may enter, or None; never waits. Mutates: self, scheduler, sampler."""
        if len(self.in_ring) >= self.limit:
            return None
        if self.controls:
            message = self.controls.popleft()
        elif not self.stopping and self.held_s() == 0 and (rows := self._next_rows()):
            message = StageMessage(MessageKind.ROWS, tuple(rows))
            with self._timed.work(message):
                message = replace(message, tensors=self.sampler.inputs(rows))
            self.sampler.look_ahead(rows)
        else:
            return None
        self.in_ring.append(message.bare)
        return message

    def held_s(self) -> float:
        """Seconds for which what is ready still waits for rows of other sessions; 0: for nothing. Mutates: self."""
        if self.wait_s == 0 or len(self.in_ring) >= self.limit or not self.scheduler.may_gain_rows:
            self._held_since_s = None
            return 0.0
        now_s = clock.monotonic_s()
        self._held_since_s = now_s if self._held_since_s is None else self._held_since_s
        return max(0.0, self._held_since_s + self.wait_s - now_s)

    def _next_rows(self) -> list[MicroStep]:
        taken, places = len(self.in_ring), None
        if self.scheduler.max_rows > 1:
            live = sum(not self.scheduler.is_background(each.rows) for each in self.in_ring)
            places = Places(self.limit - taken, self.limit - live, self.limit)
        rows = self.scheduler.next(background=taken < self.scheduler.stages, places=places)
        if rows:
            self._held_since_s = None
        return rows

    def notify(self, call: Callable[[], None]) -> None:
        """Does nothing: no other rank sends to this queue."""

    def close(self, limit_s: float = 0.0) -> None:
        """Let no more forwards enter. Mutates: self."""
        self.stopping = True

    def back(self, message: StageMessage) -> list[Finished]:
        """Process a message that has come back; returns finished chunks. Mutates: self, scheduler, sampler."""
        entered = self.in_ring.popleft()
        if message.kind is MessageKind.SWAP_IN and message.control is not None:
            self.swapped_in.append(message.control)
        if message.kind is not MessageKind.ROWS:
            return []
        with self._timed.work(entered):
            finished = self.sampler.advance(message.rows, message.tensors[0])
        for row in message.rows:
            self.scheduler.returned(row)
        return finished
