"""The processes of one ring: who they are, and whether they are alike. torchrun, or `engine.launch`, started them.

Beside the links the ranks have a store (a small key-value server that the launcher keeps) for what is said at start and
for what must be heard when links are broken.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from streamdiff.errors import ConfigError
from streamdiff.pipeline.budget import Room

START_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other while weights are loaded."""
_FOR_EVER = timedelta(days=3650)  # a receive is posted long before anybody has to send; `Watch` finds who hangs


@dataclass(frozen=True)
class Member:
    """This process among the `ranks` of its ring: those of the stages first, then one that only decodes, if any."""

    rank: int
    ranks: int
    store: Store

    def tell_room(self, room: Room) -> None:
        """Tell the head what memory this rank has for sessions."""
        self.store.set(f"room/{self.rank}", json.dumps(room))

    def hear_rooms(self) -> list[Room]:
        """What all ranks have told; waits for them."""
        return [Room(*json.loads(self.store.get(f"room/{rank}"))) for rank in range(self.ranks)]

    def meet(self) -> None:
        """Wait until all ranks are here, as one may take minutes longer than another to compile. Once per ring."""
        self.store.set(f"met/{self.rank}", "")
        self.store.wait([f"met/{rank}" for rank in range(self.ranks)], START_LIMIT)


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


def join(facts: Mapping[str, str]) -> Member:
    """Meet the other ranks and compare `facts`, which must be the same everywhere; then gloo's group is up.

    Mutates: torch.distributed's default group.

    Raises:
        ConfigError: a fact that differs; names rank, fact and both values.
    """
    store, rank, world = next(rendezvous("env://", timeout=START_LIMIT))
    store = PrefixStore("streamdiff", store)
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
    return Member(rank, world, store)
