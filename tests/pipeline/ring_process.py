"""One rank of a test ring: `python -m tests.pipeline.ring_process RANK STAGES PORT OUT CASES...`.

All ranks play the cases in turn; rank 0 writes the latents of each to OUT.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from streamdiff.models.model import Model
from streamdiff.pipeline import topology
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.topology import StageTopology, connect_stage
from tests.pipeline.distributed.rendezvous_backend import join_ring
from tests.pipeline.distributed.rough import BROKEN, LANES, LINKS
from tests.pipeline.playing import CHUNKS, CHUNKS_LONG, OTHER_STEPS, THREE, play
from tests.small import CPU, small_model

ORDERS = THREE | OTHER_STEPS
LEAVE_S = 60.0  # on a busy machine
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_of(dtype: str) -> Model:
    """The test model; in bfloat16 with those parts in float32 that diffusers keeps so."""
    model = small_model(1, layers=4, sink=2)
    for name, weight in model.denoiser.model.named_parameters():
        if not any(part in name for part in WanTransformer3DModel._keep_in_fp32_modules):
            weight.data = weight.data.to(DTYPES[dtype])
    return model


class Case(NamedTuple):
    """What a ring is to make; `links` is a name in `LINKS`."""

    dtype: str
    max_rows: int
    names: list[int]
    links: str

    @classmethod
    def of(cls, text: str) -> Case:
        """From `float32/1/0,2` or `float32/1/0,2/rough`: data type, rows per forward, sessions, links."""
        dtype, max_rows, names, links = [*text.split("/"), "plain"][:4]
        return cls(dtype, int(max_rows), [int(name) for name in names.split(",")], links)

    @property
    def chunks(self) -> int:
        return CHUNKS if self.links in BROKEN else CHUNKS_LONG


def main(rank: int, stages: int, port: int, out: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    join_ring(rank, stages, port)
    results = {}
    for number, text in enumerate(cases):
        case = Case.of(text)
        topology.TcpSender, topology.TcpReceiver = LINKS[case.links]  # type: ignore[misc]
        model = model_of(case.dtype)
        rank_topology = StageTopology(rank, stages, number, case.max_rows, "nccl" if case.links == LANES else "gloo")
        part = model.part(*split_evenly(model.blocks, stages)[rank])
        if rank:
            connect_stage(part, rank_topology, CPU).worker().run()
            continue
        ring = Ring(part, CPU, rank_topology.rows, connect_stage(part, rank_topology, CPU))
        if case.links in BROKEN:  # rubbish is to come out, and nobody to end its sessions
            ring.faults.rows_ok = lambda message: [True] * len(message.rows)  # type: ignore[method-assign]
        results[text] = play(ring, model, {name: ORDERS[name] for name in case.names}, case.chunks)
        ring.stop(LEAVE_S)
    if rank == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
