"""The denoiser in training: how it is trained, its optimizer, its running average, and its checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from streamdiff.models.model import Model
from training import loop
from training.network import Network

MATRIX_LR = 1e-2
OTHER_LR = 2e-3
# Matrices that AdamW trains: tables, embeddings and the two ends, for which orthogonal updates make no sense.
ADAM_PARTS: tuple[str, ...] = (
    "encoder",
    "reader",
    "transformer.patch_embedding",
    "transformer.proj_out",
    "transformer.scale_shift_table",
    "transformer.condition_embedder",
)
Statistics = Callable[[], tuple[Tensor, Tensor]]
LossesOf = Callable[[float, random.Random, torch.Generator], Mapping[str, Tensor]]
"""Of the share of the budget that is done, 0 to 1, and the step's randomness: one that all processes share, and one of
this process."""


@dataclass(frozen=True)
class Plan:
    """How to train: samples per process and step, a factor on the learning rates, what to begin with: a finished model,
    whose text encoder then stays as it is, or nothing; and whether matrices are multiplied in bfloat16."""

    batch: int = 4
    rate: float = 1.0
    begin: Model | None = None
    bf16: bool = False


class Learner:
    """A network in training: its optimizer, its running average, and its checkpoint, from which it goes on.
    `statistics` are the latents' mean and deviation `[C]`, those of the checkpoint where there is one; `smooth` the
    losses of late."""

    def __init__(self, network: Network, out: Path, plan: Plan, device: torch.device, statistics: Statistics) -> None:
        """Go on with `out/denoiser.pt`, else with what `plan` begins with, else with nothing: `statistics` computes the
        latents' then. Mutates: network."""
        if plan.begin is not None:  # it reads well: training that too would cost more than half of a GPU's step
            network.encoder.requires_grad_(False)
            statistics = partial(network.load_model, plan.begin)
        self.network, self.smooth = network, dict[str, Tensor]()
        tables = (f"transformer.blocks.{i}.scale_shift_table" for i in range(len(network.transformer.blocks)))
        adam = (*ADAM_PARTS, *tables)
        self.optimizer = loop.Optimizer(network, MATRIX_LR * plan.rate, OTHER_LR * plan.rate, adam=adam)
        self._checkpoint = loop.Checkpoint(out / "denoiser.pt")
        state = self._checkpoint.load(device)
        self.progress = self._checkpoint.progress
        self.statistics = statistics() if state is None else (state["mean"], state["std"])
        self.average = loop.Average(network)
        if state is None:
            return
        network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.weights = state["average"]

    def train(self, budget: loop.Budget, seed: int, every: int, shares: Mapping[str, float], losses: LossesOf) -> None:
        """Train until the budget is spent: each step adds up its `losses` by their `shares`. The checkpoint is written
        after `every` so many steps, and at the end, when the network has the averaged weights. Mutates: self, network.
        """
        for done in loop.steps(budget, self.progress, "denoiser"):
            step = self.progress.step
            shared = random.Random(seed * 1_000_003 + step)
            self._learn(losses(done, shared, loop.step_generator(seed, step)), shares, done)
            if step % every == every - 1:
                self._tell(step + 1)
                self._save(step + 1)
        self._save(self.progress.step)
        self.network.load_state_dict(self.average.weights)
        self.network.eval()

    def _learn(self, losses: Mapping[str, Tensor], shares: Mapping[str, float], done: float) -> None:
        total = torch.stack([shares[kind] * loss for kind, loss in losses.items()]).sum()
        self.optimizer.step(total, done, self.progress.step)
        self.average.update(self.network, self.progress.step)
        for kind, loss in losses.items():
            self.smooth[kind] = torch.lerp(self.smooth.get(kind, loss.detach()), loss.detach(), 0.03)

    def _tell(self, step: int) -> None:
        """Print the smoothed losses; waits for the device."""
        if loop.rank() == 0:
            values = " ".join(f"{kind} {float(value):.4f}" for kind, value in sorted(self.smooth.items()))
            print(f"denoiser step {step}: {values}", flush=True)

    def _save(self, done_steps: int) -> None:
        self._checkpoint.save(
            done_steps,
            network=self.network.state_dict(),
            optimizer=self.optimizer.state_dict(),
            average=self.average.weights,
            mean=self.statistics[0],
            std=self.statistics[1],
        )
