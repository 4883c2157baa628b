"""One rank of a ring whose stages are shared:
`python -m tests.pipeline.distributed.context_process RANK RANKS PORT OUT CASES...`.

A case is `PxC/CHUNKS/ORDERS/LINK`, as `2x2/12/0,1,2/gloo`; the ranks beyond P times C sit it out. With the link `nccl`
there is `rendezvous_backend` in the place of NCCL, and gloo's exchanges. Rank 0 writes the latents of each to OUT.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from streamdiff.models.model import Model
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.topology import Link, StageTopology, connect_stage, join_edges
from tests.pipeline.distributed.rendezvous_backend import join_ring
from tests.pipeline.playing import THREE, Order, play
from tests.small import CONTROLS, CPU, RED, WHITE, small_model, small_world

LEAVE_S = 60.0  # on a busy machine
LIKENESS = 0.97
ORDERS = THREE | {4: Order(RED, 9, 4, "clean", switch="recache-causal")}
ADAPTIVE = {5: Order(RED, 5, 4, "clean"), 6: Order(WHITE, 6, 4, "same_step")}
"""Those of a model whose sink takes chunks in."""
STEERED = {
    7: Order(RED, 5, 4, "clean", switch="recache", keys={1: [{"x": 1.0}], 3: [{"x": 0, "jump": 1}], 6: [{"jump": 0}]}),
    8: Order(RED, 5, 4, "staircase", keys={2: [{"pan": -0.5}], 5: [{"pan": 0}, {"x": -1}, {"x": 0}]}),
    9: Order(WHITE, 6, 4, "same_step", keys={0: [{"x": 0.25}], 4: [{"x": -1, "pan": 1}]}),
}
"""Those of a model that has controls."""
WORLDS = {
    10: Order(RED, 5, 4, "clean", switch="recache", keys={1: [{"walk": 1.0}], 3: [{"walk": 0.0, "yaw": -1.0}]}),
    11: Order(RED, 5, 4, "staircase", keys={0: [{"yaw": 0.5}], 2: [{"walk": 1.0}], 5: [{"yaw": 0.0}]}),
    12: Order(WHITE, 6, 4, "same_step", 5, then_steps=2, keys={2: [{"walk": 1.0}]}),
}
"""Those of a world with action modules."""


def shared_model(names: Iterable[int]) -> Model:
    """The model for these sessions: four blocks of four heads."""
    if WORLDS.keys() & names:
        return small_world(1, layers=4, heads=4)
    controls = CONTROLS if STEERED.keys() & names else ()
    model = small_model(1, layers=4, heads=4, sink=2, controls=controls)
    if ADAPTIVE.keys() & names:
        return replace(model, spec=replace(model.spec, adaptive_sink=LIKENESS, rope="absolute"))
    return model


class Case(NamedTuple):
    """What ranks are to make."""

    stages: int
    shares: int
    chunks: int
    names: tuple[int, ...]
    link: Link

    @classmethod
    def of(cls, text: str) -> Case:
        parallel, chunks, names, link = text.split("/")
        stages, shares = map(int, parallel.split("x"))
        return cls(stages, shares, int(chunks), tuple(map(int, names.split(","))), "nccl" if link == "nccl" else "gloo")


def main(rank: int, ranks: int, port: int, out: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    join_ring(rank, ranks, port)
    results = {}
    for number, text in enumerate(cases):
        case = Case.of(text)
        model = shared_model(case.names)
        topology = StageTopology(rank, case.stages, number, link=case.link, shares=case.shares)
        if topology.stage >= case.stages:
            join_edges(topology, model.spec, CPU)
            continue
        part = model.part(*split_evenly(model.blocks, case.stages)[topology.stage])
        if rank:
            connect_stage(part, topology, CPU).worker().run()
            continue
        ring = Ring(part, CPU, topology.rows, connect_stage(part, topology, CPU))
        orders = ORDERS | ADAPTIVE | STEERED | WORLDS
        results[text] = play(ring, model, {name: orders[name] for name in case.names}, case.chunks)
        ring.stop(LEAVE_S)
    if rank == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
