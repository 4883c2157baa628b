"""Start-up progress of the ranks of a ring: each reports it, rank 0 shows a bar of compiled graphs, and a rank that
makes no progress is named.

Ranks wait for each other as they start, so one that stands still holds up all. It is found as the one that is least
far: every rank compares all of them, with the same result. After the start `heartbeat.HealthMonitor` takes over.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, NoReturn

from tqdm import tqdm

from streamdiff import clock
from streamdiff.pipeline.distributed.link import ring_edges
from streamdiff.pipeline.distributed.rendezvous import RankContext

logger = logging.getLogger(__name__)

PHASES = {"weights": 240.0, "communicators": 120.0, "first transfers": 120.0, "graphs": 1800.0, "ready": float("inf")}
"""What comes after the rendezvous, in order, and how many seconds a rank may spend there without getting on. A single
graph of a large model takes minutes. The warm-up follows, which `model.watchdog_s` bounds. All end before whoever
waits for the engine process (`engine.process.engine_process`) loses patience, who knows no rank."""
LOOK_S = 0.5


class RankState(NamedTuple):
    """Start-up state of one rank: `edge` within communicators and first transfers; `made` graphs; `number` grows
    while it is alive."""

    phase: str = next(iter(PHASES))
    edge: int = 0
    made: int = 0
    number: int = 0

    @property
    def position(self) -> tuple[int, int]:
        return list(PHASES).index(self.phase), self.edge


class StartProgress:
    """One rank's view of `stages` that `shares` ranks share each. Rank 0, also where it is alone (`context` is None),
    draws a bar of all ranks on stderr."""

    def __init__(
        self,
        context: RankContext | None,
        stages: int,
        on_fault: Callable[[str], None] = lambda fault: None,
        shares: int = 1,
    ) -> None:
        """Where there are several ranks, a thread tells how far this one is until `finish`, and calls `on_fault`, once,
        with what it says of a rank that stands still."""
        self._context, self._stages, self._shares, self._on_fault = context, stages, shares, on_fault
        self._state, self._number = RankState(), 0  # written by the rank's own thread, and by this one's
        self._bar: tqdm[NoReturn] | None = None
        self._ended = threading.Event()
        if context is not None:
            # A connection of its own: the other one is taken as long as this rank waits for a key.
            own = replace(context, store=context.store.clone())  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._run, args=(own,), name="start", daemon=True)
            self._thread.start()

    def enter(self, phase: str, edge: int = 0) -> None:
        """Report that this rank begins a phase, or an edge in it; at once, as it may hang in it. Mutates: self, the
        store."""
        if self._context is not None and self._context.rank == 0 and phase != self._state.phase:
            logger.info("the ring starts: %s", phase)
        self._state = self._state._replace(phase=phase, edge=edge)
        self._tell(self._context)

    def report(self, made: int, of: int) -> None:
        """This rank has graphs of `made` kinds of forward, of `of`, the same on all ranks. Mutates: self, the store."""
        self._state = self._state._replace(made=made)
        self._tell(self._context)
        if self._bar is None and (self._context is None or self._context.rank == 0):
            self._bar = tqdm(total=of * self._stages * self._shares, desc="compiling", unit="graph", dynamic_ncols=True)
        self.draw()

    def draw(self) -> None:
        """Show what all ranks together have made so far, if it is more than before. Mutates: self."""
        if self._bar is None:
            return
        states = {0: self._state} if self._context is None else self._states(self._context)
        made = sum(state.made for state in states.values())
        if made > self._bar.n:
            self._bar.update(made - self._bar.n)
            self._bar.refresh()
            if made == self._bar.total:
                self._bar.close()

    def finish(self) -> None:
        """Wait until all ranks are ready, so that nothing is sent to one that still compiles. Once per ring. It polls,
        so that signals are handled. Mutates: self."""
        self.enter("ready")
        if self._context is not None:
            self._context.meet(self.draw)
            self._ended.set()
            self._thread.join()

    def _run(self, context: RankContext) -> None:
        watch = StartWatch(self._stages, self._shares)
        try:
            while not self._ended.wait(LOOK_S):
                self._number += 1
                self._tell(context)
                if fault := watch.fault(self._states(context), clock.monotonic_s()):
                    self._on_fault(context.report_fault(fault))
                    return
        except RuntimeError as error:  # the store's server is gone, and the launcher with it
            self._on_fault(f"the launcher of the ranks is gone: {error}")

    def _tell(self, context: RankContext | None) -> None:
        if context is not None:
            context.store.set(f"start/{context.rank}", json.dumps(self._state._replace(number=self._number)))

    def _states(self, context: RankContext) -> dict[int, RankState]:
        """The last reported state of each rank."""
        keys = {rank: f"start/{rank}" for rank in range(context.ranks)}
        store = context.store
        return {
            rank: RankState(*json.loads(store.get(key))) if store.check([key]) else RankState()
            for rank, key in keys.items()
        }


class StartWatch:
    """Detects a rank that makes no progress during the start."""

    def __init__(self, stages: int, shares: int = 1) -> None:
        self._edges = ring_edges(stages, shares)
        self._since: dict[int, tuple[RankState, float]] = {}
        self._heard: dict[int, tuple[int, float]] = {}

    def fault(self, states: Mapping[int, RankState], now_s: float) -> str | None:
        """Who stands still and where, once it has lasted longer than the phase allows. Mutates: self."""
        for rank, state in states.items():
            still = state._replace(number=0)
            if self._since.get(rank, (None,))[0] != still:
                self._since[rank] = still, now_s
            if self._heard.get(rank, (None,))[0] != state.number:
                self._heard[rank] = state.number, now_s
        least = min(state.position for state in states.values())
        behind = [rank for rank, state in states.items() if state.position == least]
        limit_s = PHASES[phase := states[behind[0]].phase]
        if any(now_s - self._since[rank][1] < limit_s for rank in behind):
            return None
        silent = [rank for rank in behind if now_s - self._heard[rank][1] >= limit_s / 2]
        where = phase
        if phase in ("communicators", "first transfers"):
            source, target = self._edges[least[1]]
            where += f", edge {least[1]} from rank {source} to rank {target}"
        ranks = f"rank {', '.join(map(str, silent or behind))}{' says nothing and' if silent else ''}"
        return f"{ranks} does not get on in the start's phase {where}: {limit_s:g} s without progress"
