"""The processes of one ring: who they are, and whether they are alike. torchrun, or `engine.process.launcher`, started
them.

Beside the links the ranks have a store (a small key-value server that the launcher keeps) for what is said at start and
for what must be heard when links are broken.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from streamdiff import clock
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.pipeline.planner.kv_budget import RankMemory

START_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other while weights are loaded."""
STILL_S = 1800.0
"""How long they wait for one that gets no further: a single graph of a large model takes minutes."""
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

    def send_made(self, made: int) -> None:
        """Tell rank 0 how many of its graphs this rank has made, see `compile_progress.Progress`."""
        self.store.set(f"made/{self.rank}", str(made))

    def receive_made(self, stages: int) -> list[int]:
        """What the ranks of the stages have told last, 0 where one has told nothing yet."""
        keys = [f"made/{rank}" for rank in range(stages)]
        return [int(self.store.get(key)) if self.store.check([key]) else 0 for key in keys]

    def meet(self, progress: Callable[[], int] = lambda: 0) -> None:
        """Wait until all ranks are here, and nothing can be sent to one that compiles. Once per ring.

        `progress` is how much all ranks have made so far. The wait is a row of looks, between which a signal is heard.

        Raises:
            EngineFailure: some are not here, and there was no progress for `STILL_S`; names them.
        """
        self.store.set(f"met/{self.rank}", "")
        made, since_s = progress(), clock.monotonic_s()
        while missing := [rank for rank in range(self.ranks) if not self.store.check([f"met/{rank}"])]:
            if (now := progress()) > made:
                made, since_s = now, clock.monotonic_s()
            if clock.monotonic_s() - since_s > STILL_S:
                raise EngineFailure(f"rank {_names(missing)} did not get ready: no progress for {STILL_S:g} s")
            threading.Event().wait(_LOOK_S)
        progress()


def check_world(stages: int, ranks: int) -> None:
    """Raises ConfigError unless as many ranks were launched as a ring of `stages` needs."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == ranks:
        return
    wanted = f"stages is {stages}" + (" and decoding has a rank of its own" if ranks > stages else "")
    if world == 1:
        raise ConfigError(
            f"{wanted}, but this is one process. `streamdiff serve` and `streamdiff generate` start their ranks by "
            f"themselves; a program of your own needs torchrun --nproc-per-node {ranks}: examples/torchrun_stream.py"
        )
    raise ConfigError(f"{wanted}, but torchrun started {world} ranks; start {ranks}, or change the configuration")


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
    everybody = [json.loads(store.get(f"facts/{other}")) for other in range(world)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # the store may live in this process and goes with it: nobody leaves before all have read
        store.wait([f"read/{other}" for other in range(world)])
    for other, theirs in enumerate(everybody):
        for name in sorted({*everybody[0], *theirs}):
            if theirs.get(name) != everybody[0].get(name):
                raise ConfigError(
                    f"rank {other} has {name} {theirs.get(name)}, but rank 0 has {everybody[0].get(name)}; all ranks "
                    "of a ring need the same"
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
        part = PrefixStore(store.get(f"welcome/{own}").decode(), store)
        part.set(f"here/{rank}", "")
        return part
    part, end_s = PrefixStore(own, store), clock.monotonic_s() + START_LIMIT.total_seconds()
    while missing := [other for other in range(1, world) if not part.check([f"here/{other}"])]:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", own)
        if clock.monotonic_s() > end_s:
            raise EngineFailure(f"rank {_names(missing)} did not come within {START_LIMIT.total_seconds():g} s")
        threading.Event().wait(_LOOK_S)
    return part


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
