"""One rank of a ring, and the ranks that decode, over rough links, with the embedded model:
`python -m tests.pipeline.rest_process RANK RANKS PORT FOLDER STAGES SHARES DECODE`.

The head plays two sessions, and with micro-steps in the ring swaps the first out and in, to host memory or, where
FOLDER/disk is there, to disk; each rank keeps its part. Then it saves it to FOLDER/ring, and goes on from FOLDER/alone
with a third one. Where FOLDER/damage is there, a file of the first is damaged at last, and its stream begins afresh. It
writes what it showed of all, and afresh.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from streamdiff.config import ServedModel
from streamdiff.core import Frames
from streamdiff.pipeline import build, rank_process, topology
from streamdiff.pipeline.snapshot.file import Snapshot, mapped
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
from tests.pipeline.distributed.rough import LINKS
from tests.saving import save
from tests.small import RED, WHITE
from tests.swap_files import damage, swap_files

AHEAD = 2
"""Chunks that a session may be ahead of the other, which has more forwards: else all would be made before a swap."""


def opened(pipeline: StreamingPipeline) -> None:
    pipeline.open(0, pipeline.text.encode(RED), seed=3, epoch=5, steps=4, kv_context="same_step")
    pipeline.open(1, pipeline.text.encode(WHITE), seed=1, epoch=0, steps=4, kv_context="clean")


class Shown:
    """Pictures of all sessions."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.pipeline = pipeline
        self.pictures: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}

    def take(self, frames: list[Frames]) -> None:
        for each in frames:
            self.pictures[each.session] += list(each.pictures)

    def step(self, *sessions: int) -> None:
        least = min(len(self.pictures[session]) for session in sessions)
        for session in sessions:
            ahead = len(self.pictures[session]) - least
            self.pipeline.set_frame_credit(session, max(0, AHEAD * self.pipeline.info.chunk_frames - ahead))
        self.take(self.pipeline.step(0.05))

    def play(self, chunks: float, *sessions: int) -> None:
        while any(len(self.pictures[each]) < chunks * self.pipeline.info.chunk_frames for each in sessions):
            self.step(*sessions)

    def until_under_way(self, micro_steps: int) -> None:
        """Until so many of session 0 are in the ring."""
        chunks = self.pipeline.scheduler.session(0).chunks
        while sum(chunk.entered - chunk.back for chunk in chunks) < micro_steps:
            self.step(0)  # not both: it would mostly wait for the other, with nothing in the ring


def out(shown: Shown, folder: Path, ranks: int) -> None:
    """Swap session 0 out, and let the other go on for a chunk, and until all parts of the first are where they are to
    be: one on each rank that runs a stage, and on each that decodes."""
    pipeline, place = shown.pipeline, "disk" if (folder / "disk").exists() else "host"
    pipeline.resting.swap_out(0)
    shown.play(len(shown.pictures[1]) // pipeline.info.chunk_frames + 1, 1)
    while place == "disk" and (len(swap_files(folder)) < ranks or pipeline.resting.place(0) != "disk"):
        shown.step(1)
    assert pipeline.resting.is_away(0) and pipeline.resting.place(0) == place


def back(shown: Shown) -> None:
    shown.pipeline.resting.swap_in(0)
    while shown.pipeline.resting.is_away(0) and not shown.pipeline.resting.lost:
        shown.step(1)


def main(rank: int, ranks: int, port: int, folder: Path, stages: int, shares: int, decode: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    use_rendezvous()
    topology.TcpSender, topology.TcpReceiver = LINKS["rough"]  # type: ignore[misc]
    config = ServedModel(
        parallel=f"{stages}x{shares}", decode_rank=decode, device="cpu", pictures="rgb",
        host_memory_gb=0.0 if (folder / "disk").exists() else 1.0, state_dir=str(folder / "state"),
    )  # fmt: skip
    if rank:
        rank_process.run_worker(config)
        return
    pipeline = build.build_pipeline(config)
    opened(pipeline)
    shown, micro_steps = Shown(pipeline), 2 if stages > 1 else 0
    for chunks in (2, 3):
        shown.play(chunks, 0, 1)
        shown.until_under_way(micro_steps)
        out(shown, folder, ranks)
        back(shown)
    shown.until_under_way(micro_steps)
    snapshot, frames = save(pipeline, 0)
    snapshot.write(folder / "ring")
    shown.take(frames)
    found = {"saved_at": np.array(len(shown.pictures[0]))}
    shown.take(pipeline.resting.load(2, Snapshot.from_bytes(mapped(folder / "alone"))))
    shown.play(len(shown.pictures[0]) / pipeline.info.chunk_frames + 2, 0, 1)
    shown.play(2, 2)
    found |= {str(session): np.stack(shown.pictures[session]) for session in range(3)}
    if (folder / "damage").exists():
        out(shown, folder, ranks)
        damage(next(file for file in swap_files(folder) if f"/proc/{os.getpid()}/" not in str(file)))
        back(shown)
        assert pipeline.resting.lost == [0]
        shown.pictures[0].clear()
        pipeline.reset(0, pipeline.text.encode(RED), seed=3, epoch=6)
        shown.play(2, 0)
        found["0 afresh"] = np.stack(shown.pictures[0])
    assert not swap_files(folder)
    pipeline.close()
    np.savez(folder / "shown.npz", **found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), *map(int, sys.argv[5:7]), sys.argv[7])
