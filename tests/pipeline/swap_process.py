"""One rank of a ring, and the ranks that decode, over rough links, with the embedded model:
`python -m tests.pipeline.swap_process RANK RANKS PORT FOLDER STAGES SHARES DECODE`.

The head plays two sessions and swaps the first out and in, with micro-steps in the ring, to host memory or, where
FOLDER/disk is there, to disk; each rank keeps its part. Where FOLDER/damage is there, a file is damaged at last, and
the stream begins afresh. It writes what it showed of both, and afresh.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from streamdiff.config import ServedModel
from streamdiff.pipeline import build, rank_process, topology
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
from tests.pipeline.distributed.rough import LINKS
from tests.small import RED, WHITE

AHEAD = 2
"""Chunks that a session may be ahead of the other, which has more forwards: else all would be made before a swap."""


def opened(pipeline: StreamingPipeline) -> None:
    pipeline.open(0, pipeline.text.encode(RED), seed=3, epoch=5, steps=4, kv_context="same_step")
    pipeline.open(1, pipeline.text.encode(WHITE), seed=1, epoch=0, steps=4, kv_context="clean")


class Shown:
    """Pictures of both sessions."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.pipeline = pipeline
        self.pictures: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def step(self, *sessions: int) -> None:
        least = min(len(self.pictures[session]) for session in sessions)
        for session in sessions:
            ahead = len(self.pictures[session]) - least
            self.pipeline.set_frame_credit(session, max(0, AHEAD * self.pipeline.info.chunk_frames - ahead))
        for each in self.pipeline.step(0.05):
            self.pictures[each.session] += list(each.pictures)

    def play(self, chunks: float, *sessions: int) -> None:
        while any(len(self.pictures[each]) < chunks * self.pipeline.info.chunk_frames for each in sessions):
            self.step(*sessions)


def under_way(pipeline: StreamingPipeline) -> int:
    return sum(chunk.entered - chunk.back for chunk in pipeline.scheduler.session(0).chunks)


def on_disk(folder: Path) -> list[Path]:
    """Files of what is swapped out, of all ranks."""
    return list((folder / "state").glob("swap/*/*.safetensors"))


def out(shown: Shown, folder: Path, ranks: int) -> None:
    """Swap session 0 out, and let the other go on for a chunk, and until all parts of the first are where they are to
    be: one on each rank that runs a stage, and on each that decodes."""
    pipeline = shown.pipeline
    pipeline.swapping.swap_out(0)
    shown.play(len(shown.pictures[1]) // pipeline.info.chunk_frames + 1, 1)
    while (folder / "disk").exists() and (len(on_disk(folder)) < ranks or pipeline.swapping.place(0) != "disk"):
        shown.step(1)
    assert pipeline.swapping.is_away(0) and pipeline.swapping.place(0) == (
        "disk" if (folder / "disk").exists() else "host"
    )


def back(shown: Shown) -> None:
    shown.pipeline.swapping.swap_in(0)
    while shown.pipeline.swapping.is_away(0):
        shown.step(1)


def damage_one(shown: Shown, folder: Path, parts: int) -> None:
    """The largest file that is not the head's own."""
    out(shown, folder, parts)
    own = shown.pipeline.stage.swaps._folder
    file = max((path for path in on_disk(folder) if path.parent != own), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    back(shown)
    assert shown.pipeline.swapping.take_lost() == [0]
    shown.pictures[0].clear()
    shown.pipeline.reset(0, shown.pipeline.text.encode(RED), seed=3, epoch=6)


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
    shown = Shown(pipeline)
    parts = stages * shares + 1
    for chunks in (2, 3):
        shown.play(chunks, 0, 1)
        while under_way(pipeline) < (2 if stages > 1 else 0):
            shown.step(0)  # not both: it would mostly wait for the other, with nothing in the ring
        out(shown, folder, parts)
        back(shown)
    shown.play(len(shown.pictures[0]) / pipeline.info.chunk_frames + 2, 0, 1)  # made after the last swap
    found = {str(session): np.stack(shown.pictures[session]) for session in (0, 1)}
    if (folder / "damage").exists():
        damage_one(shown, folder, parts)
        shown.play(2, 0)
        found["0 afresh"] = np.stack(shown.pictures[0])
    assert not on_disk(folder)
    pipeline.close()
    np.savez(folder / "shown.npz", **found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), *map(int, sys.argv[5:7]), sys.argv[7])
