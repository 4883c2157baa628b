"""Rendezvous of the ranks of a ring, which torchrun or `engine.process.launcher` started: joins them, and checks that
they run the same program and configuration. From then on each has a `heartbeat.RankWatch`.

Beside the links the ranks have a store (a small key-value server that the launcher keeps), for the start and for faults
when links are broken.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from streamdiff import clock
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.pipeline.planner.kv_budget import RankMemory

START_LIMIT = timedelta(minutes=4)
"""How long ranks wait for each other to come."""
_FAULT = "fault"
_LOOK_S = 0.05
_FOR_EVER = timedelta(days=3650)  # a receive is posted long before anybody has to send; `RankWatch` finds who hangs


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
