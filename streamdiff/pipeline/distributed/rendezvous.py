"""Rendezvous of the ranks of a ring, which torchrun or `engine.process.launcher` started: joins them, and checks that
they run the same program and configuration; then watches their start, until `heartbeat.HealthMonitor` takes over.

Beside the links the ranks have a store (a small key-value server that the launcher keeps), for the start and for faults
when links are broken. Ranks wait for each other as they start, so one that stands still holds up all. It is found as
the one that is least far: every rank compares all of them, with the same result.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm

from streamdiff import clock
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.pipeline.distributed.link import ring_edges
from streamdiff.pipeline.planner.kv_budget import RankMemory

START_LIMIT = timedelta(minutes=4)
"""How long ranks wait for each other to come."""
_FAULT = "fault"
_LOOK_S = 0.05
_FOR_EVER = timedelta(days=3650)  # a receive is posted long before anybody has to send; `HealthMonitor` finds who hangs


@dataclass(frozen=True)
class RankContext:
    """This process among the `ranks` of its ring: those of the stages first, then one that only decodes, if any."""

    rank: int
    ranks: int
    store: Store

    def send_memory(self, memory: RankMemory) -> None:
        """Tell rank 0 what memory this rank has for sessions."""
        self.store.set(f"memory/{self.rank}", json.dumps(memory))

    def receive_memories(self) -> list[RankMemory]:
        """The memory for sessions of all ranks; waits for them."""
        return [RankMemory(*json.loads(self.store.get(f"memory/{rank}"))) for rank in range(self.ranks)]

    def of_head(self, name: str, value: Any) -> Any:
        """What rank 0 has for this `value`, as JSON has it; waits for it."""
        if self.rank == 0:
            self.store.set(f"head/{name}", json.dumps(value))
        return json.loads(self.store.get(f"head/{name}"))

    def meet(self, meanwhile: Callable[[], None]) -> None:
        """Barrier of all ranks, by polling; `meanwhile` is called at each poll and at the end. Once per ring."""
        self.store.set(f"met/{self.rank}", "")
        while not all(self.store.check([f"met/{rank}"]) for rank in range(self.ranks)):
            meanwhile()
            threading.Event().wait(_LOOK_S)
        meanwhile()

    def report_fault(self, fault: str) -> str:
        """Report a fault that ends the ring to all ranks; returns the first one reported by any."""
        first: bytes = self.store.compare_set(_FAULT, "", fault)
        return first.decode()

    def fault(self) -> str | None:
        """The first fault that any rank has reported; None: there is none."""
        return self.store.get(_FAULT).decode() if self.store.check([_FAULT]) else None


def join(facts: Mapping[str, str]) -> RankContext:
    """Meet the other ranks and compare `facts`, which must be the same everywhere; then gloo's group is up.

    Mutates: torch.distributed's default group.

    Raises:
        ConfigError: a fact that differs; names rank, fact and both values.
        EngineFailure: a rank did not come.
    """
    store, rank, world = next(rendezvous("env://", timeout=START_LIMIT))
    store = _of_this_start(PrefixStore("streamdiff", store), rank, world)
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    _await(store, {other: f"facts/{other}" for other in range(world)})
    everybody = [json.loads(store.get(f"facts/{other}")) for other in range(world)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # the store may live in this process and goes with it: nobody leaves before all have read
        _await(store, {other: f"read/{other}" for other in range(world)})
    for other, theirs in enumerate(everybody):
        for name in sorted({*everybody[0], *theirs}):
            if theirs.get(name) != everybody[0].get(name):
                raise ConfigError(
                    f"rank {other} has {name} {theirs.get(name)}, but rank 0 has {everybody[0].get(name)}; all ranks "
                    "of a ring need the same",
                    field=name,
                )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_FOR_EVER)
    return RankContext(rank, world, store)


def _of_this_start(store: Store, rank: int, world: int) -> Store:
    """`store` under a key prefix of this launch.

    Restarted ranks (torchrun with `--max-restarts`) share a store with dead ones; each posts a UUID, and rank 0 answers
    with the prefix. The UUID may be that of a dead process, and is read again until all have come.

    Raises:
        EngineFailure: a rank did not come within START_LIMIT.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", own)
        _await(store, {0: f"welcome/{own}"})
        part = PrefixStore(store.get(f"welcome/{own}").decode(), store)
        part.set(f"here/{rank}", "")
        return part
    part = PrefixStore(own, store)

    def welcome(missing: Sequence[int]) -> None:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", own)

    _await(part, {other: f"here/{other}" for other in range(1, world)}, welcome)
    return part


def _await(
    store: Store, keys: Mapping[int, str], meanwhile: Callable[[Sequence[int]], None] = lambda missing: None
) -> None:
    """Wait until each rank has set its key; `meanwhile` gets, between looks, the ranks that have not.

    Raises:
        EngineFailure: a rank did not within START_LIMIT.
    """
    end_s = clock.monotonic_s() + START_LIMIT.total_seconds()
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        meanwhile(missing)
        if clock.monotonic_s() > end_s:
            ranks = ", ".join(map(str, missing))
            limit_s = START_LIMIT.total_seconds()
            raise EngineFailure(f"rank {ranks} did not come to the start's phase rendezvous within {limit_s:g} s")
        threading.Event().wait(_LOOK_S)


logger = logging.getLogger(__name__)

# ---- progress of the start -------------------------------------------------------------------------------------------

PHASES = {"weights": 240.0, "communicators": 120.0, "first transfers": 120.0, "graphs": 1800.0, "ready": float("inf")}
"""What comes after the rendezvous, in order, and how many seconds a rank may spend there without getting on. A single
graph of a large model takes minutes. The warm-up follows, which `model.watchdog_s` bounds. All end before anyone who
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
