"""One rank of a ring in which sessions fail: `python -m tests.pipeline.ring_faults_process RANK STAGES PORT OUT`.

Rank 0 writes latents, sessions that were lost and why, and forwards by rows to OUT.
"""

from __future__ import annotations

import sys

import torch

from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.state_exchange import StoreExchange
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.topology import StageTopology, connect_stage
from tests.pipeline.distributed.rendezvous_backend import join_ring
from tests.pipeline.failing import ONCE, play_failing, spoil
from tests.small import CPU, small_model

FAULTS = {1: (2, "numbers"), 3: (1, "midway"), 5: (3, "text"), 7: (2, "open"), 8: (0, "midway"), 4: (1, ONCE)}
"""By session: the rank on which it fails, and how."""
LEAVE_S = 60.0  # on a busy machine


def small() -> Model:
    return small_model(1, layers=8, sink=2)


def contexts() -> dict[int, str]:
    """KV context by session."""
    return {name: ("clean", "staircase", "same_step")[name % 4 % 3] for name in range(12)}


def main(rank: int, stages: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    store = join_ring(rank, stages, port)
    model = small()
    topology = StageTopology(rank, stages, rows=4)
    part = model.part(*split_evenly(model.blocks, stages)[rank])
    worker = connect_stage(part, topology, CPU).worker() if rank else None
    ring = Ring(part, CPU, topology.rows, connect_stage(part, topology, CPU)) if worker is None else None
    stage = worker.stage if worker is not None else ring.stage  # type: ignore[union-attr]
    stage.exchange = StoreExchange(store)
    for session, (where, kind) in FAULTS.items():
        if where == rank:
            spoil(stage, session, kind)
    if worker is not None:
        worker.run()
        return
    assert ring is not None
    latents, lost = play_failing(ring, model, contexts())
    rows = {str(rows): count for rows, count in ring.scheduler.counts.rows.items()}
    ring.stop(LEAVE_S)
    torch.save({"latents": latents, "lost": lost, "rows": rows}, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
