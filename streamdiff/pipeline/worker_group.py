"""Rank 0's view of the other ranks: their busy time, their health, and an orderly end."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from streamdiff.errors import EngineFailure
from streamdiff.pipeline.distributed.heartbeat import LEAVE_S, Heartbeat, RankWatch, await_that, exit_now, link_fault
from streamdiff.pipeline.distributed.link import LinkClosed, Receiver, Sender
from streamdiff.pipeline.ring import Ring

_NOTICE_S = 2.0
"""How long ranks may take to tell why a link is closed."""
_STUCK_S = 5.0


class WorkerGroup:
    """Rank 0's side of a ring over several processes."""

    def __init__(
        self, watch: RankWatch, watchdog_s: float, decode_links: tuple[Sender, Receiver] | None = None
    ) -> None:
        """`decode_links` lead to the rank that decodes and back; None: this one does."""
        assert watch.context is not None, "a ring over several processes"
        self.context, self._watch = watch.context, watch
        self.decode_links, self._watchdog_s = decode_links, watchdog_s
        self._fault: str | None = None
        self._since: list[Heartbeat] = []

    def start(self, ring: Ring, wake: Callable[[], None]) -> None:
        """Watch the ring; `wake` is called, from another thread, when there is a fault. Before anything else."""
        self.ring, self._wake = ring, wake
        self._watch.on_fault = self._on_fault
        atexit.register(exit_now)
        self._watch.begin([ring.worker], self._watchdog_s)

    def check(self, wait_s: float = 0.0) -> None:
        """Raises EngineFailure when the ring has a fault, or one shows within `wait_s`; chunks that come back in that
        time are dropped."""
        if self._fault is None and wait_s > 0:
            try:
                self.ring.listen(wait_s)
            except LinkClosed as error:
                raise self.broken(error) from error
            self._fault = self._watch.fault()
        if self._fault is not None:
            raise self._failure(self._fault)

    def broken(self, error: LinkClosed) -> EngineFailure:
        """The failure behind a closed link: the first fault reported, else that the neighbour is gone."""
        self._fault = str(error)  # a signal may come while it is found out who is gone: the ring has no orderly end
        reported = self._watch.fault(_NOTICE_S)
        self._fault = reported or self._watch.report(link_fault(error, self.context.rank, self._watch, self._watch))
        return self._failure(self._fault)

    def _failure(self, fault: str) -> EngineFailure:
        return EngineFailure(f"{fault}; in the ring: {self.ring.contents}")

    def occupancy(self) -> list[float]:
        """Share of the time since the ring was warm that each rank has spent at work. The first call, when it is
        warm, begins to count."""
        now = self._watch.heartbeats()
        if not self._since:
            self._since = now
        pairs = zip(self._since, now, strict=True)
        return [(b.busy_s - a.busy_s) / (b.at_s - a.at_s) if b.at_s > a.at_s else 0.0 for a, b in pairs]

    def busy_s(self) -> list[float]:
        """Seconds that each rank's device was at work since its process began, as it said last."""
        return [beat.busy_s for beat in self._watch.heartbeats()]

    def hear(self) -> None:
        """Wait for a new heartbeat of every rank, or a fault; at most `LEAVE_S`."""
        known = [beat.number for beat in self._watch.heartbeats()]

        def heard() -> bool:
            return all(beat.number > before for beat, before in zip(self._watch.heartbeats(), known, strict=True))

        await_that(lambda: self._fault is not None or heard(), LEAVE_S)

    def leave(self) -> None:
        """End the ring: in order where it is whole, else at once."""
        if self._fault is not None or self._watch.fault() is not None:
            return
        try:
            self.ring.stop()
        except LinkClosed as error:
            raise self.broken(error) from error
        self._watch.finish()
        await_that(lambda: all(beat.ended for beat in self._watch.heartbeats()), LEAVE_S)  # they need the store
        atexit.unregister(exit_now)

    def _on_fault(self, fault: str) -> None:
        self._fault = fault
        self._wake()
        if self.ring.worker.now is not None:  # the main thread may be what hangs, and no one else can end this process
            threading.Event().wait(_STUCK_S)
            if self.ring.worker.now is not None:
                exit_now(f"rank {self.context.rank} ends: {fault}")
