"""One rank of a test ring: `python -m tests.pipeline.ring_process RANK STAGES PORT OUT CASES...`.

All ranks play the cases in turn; rank 0 writes the latents of each to OUT. A case that ends in `/lanes` runs over the
NCCL link, started as the product starts it, with gloo in the place of NCCL.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from streamdiff.models.base import Model
from streamdiff.pipeline import links_nccl, ranks
from streamdiff.pipeline.ranks import Link, Place, follower, head_ring
from tests.pipeline.link_scenarios import HostStreams
from tests.pipeline.playing import CHUNKS_LONG, THREE, play
from tests.small import CPU, RED, small_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_of(dtype: str) -> Model:
    """The test model; in bfloat16 with those parts in float32 that diffusers keeps so."""
    model = small_model(1, layers=4, sink=2)
    for name, weight in model.denoiser.model.named_parameters():
        if not any(part in name for part in WanTransformer3DModel._keep_in_fp32_modules):
            weight.data = weight.data.to(DTYPES[dtype])
    return model


def parse(case: str) -> tuple[str, int, list[int]]:
    """`float32/1/0,2` or `float32/1/0,2/lanes`: data type, rows per forward, sessions."""
    dtype, max_rows, names = case.split("/")[:3]
    return dtype, int(max_rows), [int(name) for name in names.split(",")]


def link_of(case: str) -> Link:
    return "nccl" if case.endswith("/lanes") else "gloo"


def main(rank: int, stages: int, port: int, out: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    ranks.edge_groups = partial(links_nccl.edge_groups, backend="gloo")
    links_nccl.CudaStreams = lambda device: HostStreams()
    store = dist.TCPStore("127.0.0.1", port, stages, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=stages, timeout=timedelta(days=3650))
    results = {}
    for number, case in enumerate(cases):
        dtype, max_rows, names = parse(case)
        model = model_of(dtype)
        place, text, link = Place(rank, stages, number), model.text.encode(RED), link_of(case)
        if rank:
            follower(model, place, CPU, max_rows, text, link).run()
            continue
        ring = head_ring(model, place, CPU, max_rows, text, link)
        results[case] = play(ring, model, {name: THREE[name] for name in names}, CHUNKS_LONG)
        ring.stop()
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    os._exit(0)  # links have receives posted that will never be answered; gloo cannot take them back


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
