"""One rank of a ring that plays the embedded model with rows shared:
`python -m tests.pipeline.ring_rows_process RANK STAGES PORT OUT`.

Rank 0 writes latents and forwards by rows to OUT.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.model import load_model
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.topology import StageTopology, connect_head, stage_worker
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
from tests.pipeline.playing import Order, play
from tests.small import BLUE, CPU, RED, WHITE

CONTEXTS = ("clean", "clean", "staircase", "same_step")
ORDERS = {
    name: Order((RED, BLUE, WHITE)[name % 3], name, 2 + 2 * (name % 2), CONTEXTS[name % 4], 1 + name % 3)
    for name in range(10)
}
"""Sessions of all kinds, whose prompts change at different chunks."""
CHUNKS = 4
LEAVE_S = 60.0  # on a busy machine


def main(rank: int, stages: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    use_rendezvous()
    store = dist.TCPStore("127.0.0.1", port, stages, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=stages, timeout=timedelta(days=3650))
    model = load_model(EMBEDDED_WEIGHTS, CPU)
    topology = StageTopology(rank, stages, rows=4)
    part = model.part(*split_evenly(model.blocks, stages)[rank])
    if rank:
        stage_worker(part, topology, CPU).run()
        return
    ring = connect_head(part, topology, CPU)
    latents = play(ring, model, ORDERS, CHUNKS)
    ring.stop(LEAVE_S)
    torch.save({"latents": latents, "rows": dict(ring.scheduler.counts.rows)}, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
