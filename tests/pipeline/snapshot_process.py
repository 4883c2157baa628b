"""One rank of a ring, and the ranks that decode, with the embedded model:
`python -m tests.pipeline.snapshot_process RANK RANKS PORT FOLDER STAGES SHARES DECODE`.

The head plays a session, saves it to FOLDER/ring, and goes on from FOLDER/alone with another; it writes what it showed
of both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from streamdiff.config import ModelConfig
from streamdiff.pipeline import build, rank_process
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
from tests.small import RED

SAVED_AT, CHUNKS = 2, 5


def opened(pipeline: StreamingPipeline, session: int = 0) -> None:
    pipeline.open(session, pipeline.text.encode(RED), seed=3, epoch=5, steps=4, kv_context="same_step")


def play(pipeline: StreamingPipeline, pictures: list[np.ndarray], chunks: float, session: int = 0) -> None:
    """Go on until there are so many chunks' pictures. Mutates: pictures."""
    frames = pipeline.info.chunk_frames
    while len(pictures) < chunks * frames:
        pipeline.set_frame_credit(session, 6 * frames)
        pictures += shown(pipeline.step(0.1), session)


def shown(frames: list, session: int = 0) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [picture for each in frames if each.session == session for picture in each.pictures]


def micro_steps_in_flight(pipeline: StreamingPipeline, session: int = 0) -> int:
    return sum(chunk.entered - chunk.back for chunk in pipeline.scheduler.session(session).chunks)


def main(rank: int, ranks: int, port: int, folder: Path, stages: int, shares: int, decode: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    use_rendezvous()
    config = ModelConfig(parallel=f"{stages}x{shares}", decode_rank=decode, device="cpu")
    if rank:
        rank_process.run_worker(config)
        return
    pipeline = build.build_pipeline(config)
    first, second = list[np.ndarray](), list[np.ndarray]()
    opened(pipeline)
    play(pipeline, first, SAVED_AT)
    while micro_steps_in_flight(pipeline) < (2 if stages > 1 else 0):
        pipeline.set_frame_credit(0, 6 * pipeline.info.chunk_frames)  # without it the ring runs empty
        first += shown(pipeline.step())
    snapshot, frames = pipeline.saving.save(0)
    snapshot.write(folder / "ring")
    first += shown(frames)
    saved_at = len(first)
    came = pipeline.saving.load(1, Snapshot.read(folder / "alone"))
    first, second = first + shown(came), second + shown(came, 1)
    while min(len(first), len(second)) < CHUNKS * pipeline.info.chunk_frames:
        for session in (0, 1):
            pipeline.set_frame_credit(session, 6 * pipeline.info.chunk_frames)
        came = pipeline.step(0.1)
        first, second = first + shown(came), second + shown(came, 1)
    pipeline.close()
    np.savez(folder / "shown.npz", first=np.stack(first), second=np.stack(second), saved_at=saved_at)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), *map(int, sys.argv[5:7]), sys.argv[7])
