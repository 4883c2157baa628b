"""One rank of a ring of three stages, and one rank that decodes, over rough links, with the embedded model:
`python -m tests.pipeline.swap_process RANK RANKS PORT FOLDER`.

The head plays two sessions and swaps the first out and in, with micro-steps in the ring, to host memory or, where
FOLDER/disk is there, to disk; each rank keeps its part. It writes what it showed of both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from streamdiff.config import ServedModel
from streamdiff.pipeline import build, topology, worker_main
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
from tests.pipeline.distributed.rough import LINKS
from tests.small import RED, WHITE

STAGES, CHUNKS = 3, 5
FILES = STAGES + 1
"""Parts of a session: each stage's, and the decoder's."""


def opened(pipeline: StreamingPipeline) -> None:
    pipeline.open(0, pipeline.text.encode(RED), seed=3, epoch=5, steps=4, kv_context="matched")
    pipeline.open(1, pipeline.text.encode(WHITE), seed=1, epoch=0, steps=4, kv_context="clean")


class Shown:
    """Pictures of both sessions."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.pipeline = pipeline
        self.pictures: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def step(self, *sessions: int) -> None:
        for session in sessions:
            self.pipeline.set_frame_credit(session, 6 * self.pipeline.info.chunk_frames)
        for each in self.pipeline.step(0.05):
            self.pictures[each.session] += list(each.pictures)

    def play(self, chunks: float, *sessions: int) -> None:
        while any(len(self.pictures[each]) < chunks * self.pipeline.info.chunk_frames for each in sessions):
            self.step(*sessions)


def under_way(pipeline: StreamingPipeline) -> int:
    return sum(chunk.entered - chunk.back for chunk in pipeline.ring.scheduler.session(0).chunks)


def main(rank: int, ranks: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    use_rendezvous()
    topology.TcpSender, topology.TcpReceiver = LINKS["rough"]  # type: ignore[misc]
    config = ServedModel(
        stages=STAGES, decode="own-rank", device="cpu", threads=1, pictures="rgb",
        host_memory_gb=0.0 if (folder / "disk").exists() else 1.0, state_dir=str(folder / "state"),
    )  # fmt: skip
    if rank:
        worker_main.run_worker(config)
        return
    pipeline = build.load_runtime(config)
    opened(pipeline)
    shown = Shown(pipeline)
    for chunks in (2, 3):
        shown.play(chunks, 0, 1)
        while under_way(pipeline) < 2:
            shown.step(0, 1)
        pipeline.swap_out(0)
        shown.play(chunks + 1, 1)
        if (folder / "disk").exists():
            while len(list((folder / "state").glob("swap/*/*.safetensors"))) < FILES or pipeline.place(0) != "disk":
                shown.step(1)
        assert pipeline.is_away(0) and pipeline.place(0) == ("disk" if (folder / "disk").exists() else "host")
        pipeline.swap_in(0)
        while pipeline.is_away(0):
            shown.step(1)
    shown.play(CHUNKS, 0, 1)
    assert not list((folder / "state").glob("swap/*/*.safetensors"))
    pipeline.close()
    frames = CHUNKS * pipeline.info.chunk_frames
    np.savez(folder / "shown.npz", *(np.stack(shown.pictures[session][:frames]) for session in (0, 1)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
