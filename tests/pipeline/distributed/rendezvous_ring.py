"""One rank of a ring over the NCCL link, with `rendezvous_backend` in the place of NCCL:
`python -m tests.pipeline.distributed.rendezvous_ring RANK STAGES PORT`.

All ranks play the cases of `main` in turn, and print what came of each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from streamdiff.models.model import Model
from streamdiff.pipeline import topology
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.model_runner import Worker
from tests.pipeline.distributed.rendezvous_backend import Backend, Locked, Point, join_ring
from tests.pipeline.distributed.scenarios import all_receive_first, all_send_first, connect_often
from tests.pipeline.playing import same
from tests.small import BLUE, CPU, RED, WHITE, small_model

CHUNKS = {0: 200, 1: 12, 4: 12}
"""By the messages that a communicator takes before they are received."""
LEAVE_S = 60.0
DIES_AFTER = 20
Latents = dict[int, list[torch.Tensor]]
WarmUp = Callable[..., None]


def run_until(ring: Ring, ends: dict[int, int], made: Latents) -> None:
    """Have the sessions make chunks up to their ends, and nothing more: the ring comes to rest. Mutates: made."""
    while any(len(made[name]) < end for name, end in ends.items()):
        for name, end in ends.items():
            ring.scheduler.set_frame_credit(name, (end - ring.scheduler.next_chunk(name)) * ring.scheduler.chunk_frames)
        for row, latents in ring.step_latents(1.0)[1]:
            made[row.session].append(latents.clone())
    while ring.waiting:
        ring.step_latents(1.0)


def script(ring: Ring, model: Model, chunks: int, at_rest: Callable[[], None] = lambda: None) -> Latents:
    """A session of so many chunks and another that comes, and goes before it; both change their prompts, and between
    the quarters nobody wants a picture."""
    quarter, made = chunks // 4, Latents({0: [], 1: []})
    ring.open(0, model.text.encode(RED), seed=5, epoch=0, steps=2, kv_context="clean")
    run_until(ring, {0: quarter}, made)
    at_rest()
    ring.set_conditioning(0, model.text.encode(BLUE), epoch=1)
    ring.open(1, model.text.encode(WHITE), seed=6, epoch=0, steps=2, kv_context="same_step")
    run_until(ring, {0: 2 * quarter, 1: quarter}, made)
    at_rest()
    ring.set_conditioning(1, model.text.encode(RED), epoch=1)
    run_until(ring, {0: 3 * quarter, 1: 2 * quarter}, made)
    ring.close_session(1)
    run_until(ring, {0: chunks}, made)
    at_rest()
    return made


def nothing_pending() -> None:
    """Whatever waits for the whole device would wait for these; where computing is done, so are they."""
    for point in list(Point.pending):
        assert point.wait(LEAVE_S), f"at rest, and {point.name} is posted"


class Rings:
    """One rank's part of several rings, one after the other."""

    def __init__(self, rank: int, stages: int) -> None:
        self.rank, self.stages, self.number = rank, stages, 100  # of links, beyond those of `connect_often`
        self.model = small_model(1, layers=4, heads=1)
        self.part = self.model.part(*split_evenly(self.model.blocks, stages)[rank])

    def start(self, capacity: int) -> Ring | Worker:
        Backend.capacity = capacity
        where = topology.StageTopology(self.rank, self.stages, self.number, link="nccl")
        self.number += 1
        if self.rank:
            ring: Ring | Worker = topology.connect_stage(self.part, where, CPU).worker()
        else:
            ring = Ring(self.part, CPU, parts=topology.connect_stage(self.part, where, CPU))  # type: ignore[arg-type]
        assert not Point.pending, "a graph can be captured, and a kernel loaded"
        return ring

    def play(self, capacity: int, chunks: int) -> None:
        """From the start to the end in order; rank 0 compares with one stage."""
        ring = self.start(capacity)
        if isinstance(ring, Worker):
            ring.run()
            return
        made = script(ring, self.model, chunks, nothing_pending)
        ring.stop(LEAVE_S)
        alone = script(Ring(self.model, CPU), self.model, chunks)
        equal = [same(made[name], alone[name]) for name in alone]
        print(f"capacity {capacity}: {[len(latents) for latents in made.values()]} chunks, same {equal}", flush=True)

    def lock(self, warm_up: WarmUp) -> None:
        """A start in an order that cannot be."""
        right, topology.warm_up = topology.warm_up, warm_up
        try:
            self.start(4)
        except Locked as error:
            print(f"locked: {error}", flush=True)
        topology.warm_up = right

    def die(self) -> None:
        """The last rank goes without a word, its neighbours' transfers pending."""
        ring = self.start(0)
        try:
            if isinstance(ring, Ring):
                script(ring, self.model, CHUNKS[0])
            elif self.rank < self.stages - 1:
                ring.run()
            else:
                while ring.done < DIES_AFTER:
                    ring.step(None)
        except LinkClosed as error:
            print(f"ended: {error}", flush=True)


def main(rank: int, stages: int, port: int) -> None:
    torch.set_num_threads(1)
    join_ring(rank, stages, port)
    Backend.capacity = 0
    connect_often(rank, stages, CPU, 4)
    ring = Rings(rank, stages)
    for warm_up in (all_send_first, all_receive_first):
        ring.lock(warm_up)
    for capacity, chunks in CHUNKS.items():
        ring.play(capacity, chunks)
    ring.die()
    os._exit(0)  # receives are posted that nobody will answer


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
