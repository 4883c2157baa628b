"""One rank of a ring whose stream is rewound, and branches off: `python -m tests.engine.rewind_process RANK RANKS PORT
FOLDER`. Rank 0 writes what `played` returns."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import streamdiff
from streamdiff.engine import resting
from tests.small import BLUE, RED

CHUNK_S = 0.3


def played(**model: Any) -> dict[str, np.ndarray]:
    """The frames of chunks 5 to 7 of a stream: the first time, after it was rewound, and of a branch of it."""
    with streamdiff.open(RED, seed=4, rewind_mb=200, **model) as stream:
        size = stream.chunk_frames
        list(islice(stream, 3 * size))
        stream.set_prompt(BLUE, over=2)
        first = list(islice(stream, 9 * size))[2 * size : 5 * size]
        stream.rewind(5)
        again = list(islice(stream, 3 * size))
        with stream.branch(5) as branch:
            other = list(islice(branch, 3 * size))
        list(islice(stream, size))
    return {"first": np.stack(first), "again": np.stack(again), "branch": np.stack(other)}


def main(rank: int, ranks: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    resting.KEEP_S = CHUNK_S
    if rank:
        streamdiff.run_worker(stages=ranks)
    else:
        np.savez(folder / "played.npz", **played(stages=ranks))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
