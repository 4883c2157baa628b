"""Training loop of both stages: time or step budget, resumable checkpoint, learning-rate ramp, progress bar."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from streamdiff import clock
from streamdiff.models import sampling


@dataclass(frozen=True)
class Budget:
    """How long to train. Training ends at `steps`, or earlier after `minutes` (of this and resumed runs together).

    `progress` in [0, 1] drives the learning rate, so a run that a clock ends has cooled down just as one that reached
    its steps.
    """

    steps: int
    minutes: float | None = None

    def progress(self, step: int, spent_s: float) -> float:
        by_step = step / self.steps
        by_time = spent_s / (self.minutes * 60) if self.minutes else 0.0
        return min(1.0, max(by_step, by_time))


def learning_rate(peak: float, progress: float, step: int, warmup: int = 30) -> float:
    """Linear warm-up over `warmup` steps, then linear to zero as `progress` goes to 1."""
    return peak * min(1.0, (step + 1) / warmup) * (1.0 - progress)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Muon, Keller Jordan 2024), for weight matrices and convolutions.

    A convolution counts as the matrix [out, in x kh x kw]. torch.optim.Muon takes matrices only; on the autoencoder
    this one reached in 200 steps what AdamW needed 900 for. State: one momentum tensor per parameter.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update, of all matrices of one size together. Mutates: the parameters and their momentum."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(weight.flatten(1).shape, []).append(weight)
            for (high, wide), weights in alike.items():
                for each in weights:
                    if not self.state[each]:
                        self.state[each]["momentum"] = torch.zeros_like(each)
                averages = [self.state[each]["momentum"] for each in weights]
                torch._foreach_mul_(averages, group["momentum"])
                grads = [cast(Tensor, each.grad) for each in weights]
                torch._foreach_add_(averages, grads)
                ahead = torch._foreach_add(grads, averages, alpha=group["momentum"])
                updates = orthogonal(torch.stack([each.flatten(1) for each in ahead]))
                scale = max(1.0, high / wide) ** 0.5
                changes = [update.view_as(each) for update, each in zip(updates, weights, strict=True)]
                torch._foreach_add_(cast(list[Tensor], weights), changes, alpha=-group["lr"] * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to `[N, rows, columns]`, roughly: five Newton-Schulz steps with Muon's
    quintic coefficients."""
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x: Tensor = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon for matrices and convolutions, AdamW for everything else; one ramp for both."""

    def __init__(self, model: torch.nn.Module, matrix_lr: float, other_lr: float, adam: tuple[str, ...] = ()) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim >= 2 and not name.startswith(adam)]
        others = [p for name, p in named if p.ndim < 2 or name.startswith(adam)]
        fused = others[0].is_cuda or None  # one kernel for all
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [
            (Muon(matrices, matrix_lr), matrix_lr),
            (torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.97), weight_decay=0.01, fused=fused), other_lr),
        ]
        self.params = [p for _, p in named]

    def step(self, loss: Tensor, progress: float, step: int) -> None:
        """Back-propagate `loss` and update. Mutates: the model, the optimizers' state."""
        for part, peak in self.parts:
            part.zero_grad(set_to_none=True)
            for group in part.param_groups:
                group["lr"] = learning_rate(peak, progress, step)
        loss.backward()
        average_gradients(self.params)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for part, _ in self.parts:
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part, _ in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for (part, _), state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def rank() -> int:
    """This process's number when several train together under torchrun, else 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_group() -> None:
    """Train together with the other processes when started by torchrun; otherwise do nothing."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


DECAY = 0.995
"""Of the running average, once enough steps are done."""


class Average:
    """Exponential moving average of the weights; what is saved and used."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: torch.nn.Module, step: int) -> None:
        decay = min(DECAY, (1 + step) / (10 + step))
        new = module.state_dict()
        floats = [name for name, value in new.items() if value.is_floating_point()]
        for name in new.keys() - set(floats):
            self.weights[name].copy_(new[name])
        torch._foreach_lerp_([self.weights[name] for name in floats], [new[name] for name in floats], 1 - decay)


def average_gradients(params: list[torch.nn.Parameter]) -> None:
    """Average gradients over the processes. Mutates: the gradients."""
    if not dist.is_initialized():
        return
    grads = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def agree(value: float) -> float:
    """The largest of the processes' values, so that all of them take the same decision."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    shared = shared.cuda() if torch.cuda.is_available() else shared
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def step_generator(seed: int, step: int) -> torch.Generator:
    """The randomness of one step of this process: a resumed run draws what an uninterrupted one would have."""
    return torch.Generator().manual_seed(sampling.counter_seed(seed, rank(), step))


def noise_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise like `tensor`, drawn on its device; `generator` is a CPU's, and says which on any."""
    if tensor.device.type == "cpu":
        return torch.randn(tensor.shape, generator=generator)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    own = torch.Generator(tensor.device).manual_seed(seed)
    return torch.randn(tensor.shape, generator=own, device=tensor.device)


@dataclass
class Progress:
    """Where a run is: `step` counts updates, `spent_s` seconds over all resumed runs."""

    step: int = 0
    spent_s: float = 0.0


class Checkpoint:
    """One file that holds everything a run needs to go on; written to a temporary name and moved into place. `progress`
    is the run's, counted on from the file's."""

    def __init__(self, path: Path) -> None:
        self.path, self.progress = path, Progress()

    def save(self, step: int, **parts: Any) -> None:
        """Write `parts`, and that `step` updates are done."""
        if rank() > 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save({**parts, "step": step, "spent_s": self.progress.spent_s}, partial)
        os.replace(partial, self.path)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The saved parts, or None when the run starts from nothing. Tensors and plain values only, never code.

        Mutates: self.
        """
        if not self.path.is_file():
            return None
        state: dict[str, Any] = torch.load(self.path, map_location=device, weights_only=True)
        self.progress = Progress(state["step"], state["spent_s"])
        return state


def steps(budget: Budget, progress: Progress, label: str) -> Iterator[float]:
    """Yield the progress in [0, 1] before each step until the budget is spent. Mutates: progress."""
    began = clock.monotonic_s() - progress.spent_s
    with tqdm(
        total=budget.steps, initial=progress.step, desc=label, unit="step", mininterval=5, disable=rank() > 0
    ) as bar:
        while progress.step < budget.steps:
            progress.spent_s = clock.monotonic_s() - began
            done = agree(budget.progress(progress.step, progress.spent_s))
            if done >= 1.0:
                break
            yield done
            progress.step += 1
            bar.update()
