"""Train the embedded model of the 256 pixel world: `python -m streamdiff.models.tiny.world256.train`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from streamdiff.models.tiny import train_autoencoder, training
from streamdiff.models.tiny.world256 import clips


def main() -> int:
    made = argparse.ArgumentParser()
    made.add_argument("--out", type=Path, default=Path("runs/world256"))
    made.add_argument("--steps", type=int, default=8000)
    made.add_argument("--minutes", type=float)
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--bf16", action="store_true")
    made.add_argument("--threads", type=int, default=2)
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    training.join_group()
    budget = training.Budget(args.steps, args.minutes)
    train_autoencoder.train(args.out, budget, 0, torch.device("cpu"), args.batch, args.bf16, clips.RECIPE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
