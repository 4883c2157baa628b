"""Stage two of training the embedded model: the causal transformer, on latents of the trained autoencoder.

Diffusion forcing: every chunk has its own noise level and sees the chunks before it, at theirs. A step adds up losses,
each the flow's mean squared error:

- *window*, five chunks: `staircase`, whose levels fall with age as in a full ring, `clean`, where noisy copies of the
  chunks each see the clean copies of their past, or `anchored`, all at one level, with or without clean anchors;
- *first*: first chunks of streams, alone;
- *next*: a chunk after one clean chunk, at several levels;
- *again*: a stream's first chunk after a bare background, which is what is left of a shape that was lost;
- *video*: a chunk whose noisy copies show another scene, whose place and motion it keeps (`video_windows`);
- *own*: what should follow chunks that the network made itself (`on_policy`), where it begins with a finished model.

Only where a stream starts or its prompt changes must a chunk be drawn from words; everywhere else it can be copied
from the past. The short kinds hold many such places at a fraction of a window's cost. What is only seen, and has no
target, is corrupted in a share of the windows (`corruption`). One more loss teaches the text encoder to read: every
word's embedding must tell the whole scene, so that cross-attention need not search for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from streamdiff.models import sampling
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.model import Model
from streamdiff.models.tiny import prompts, world
from streamdiff.models.tiny.training import corruption, loop
from streamdiff.models.tiny.training.batches import (
    CHUNKS,
    CONTEXT_SIGMA,
    LEVELS,
    LOWEST,
    ROWS,
    Pool,
    Rows,
    Starts,
    Windows,
    latent_statistics,
)
from streamdiff.models.tiny.training.network import ATTRIBUTES, TRANSFORMER, Forward, Lesson, TinyNetwork
from streamdiff.models.tiny.training.on_policy import OwnPasts
from streamdiff.models.tiny.training.video_windows import PAST, video_windows

MATRIX_LR = 1e-2
OTHER_LR = 2e-3
POOL = 6000
SHARES = {
    "staircase": 0.4, "clean": 0.4, "first": 0.2, "next": 0.4, "again": 0.2, "anchored": 0.3, "video": 1.0, "own": 0.6,
    "reading": 0.1,
}  # fmt: skip
# Matrices that AdamW trains: tables, embeddings and the two ends, for which orthogonal updates make no sense.
ADAM_PARTS: tuple[str, ...] = (
    "encoder",
    "reader",
    "transformer.patch_embedding",
    "transformer.proj_out",
    "transformer.scale_shift_table",
    "transformer.condition_embedder",
    *(f"transformer.blocks.{i}.scale_shift_table" for i in range(TRANSFORMER["num_layers"])),
)
LONG = {"staircase": 0.43, "clean": 0.24, "anchored": 0.33}
"""How often a step's windows of five chunks are of which kind."""
FIRST_WINDOWS = 80
GONE = (1, 2, 2, 4)
"""For how many chunks a shape has been gone when it is drawn again: one of these."""
STREAMS = 64
"""The network's own streams."""
OWN_FROM = 0.75
"""Training that begins with nothing plays them from here on, 0 to 1: before, they show nothing to be corrected."""


def reading_loss(network: TinyNetwork, chance: random.Random, generator: torch.Generator, batch: int = 64) -> Tensor:
    """Cross-entropy of all four attributes, read off the embedding of every word of random captions."""
    fields = [torch.randint(len(names), (batch,), generator=generator) for names in ATTRIBUTES]
    ids = network.text.tokens(captions(torch.stack(fields, -1)[:, None], chance))
    words = ids != 0
    scores = network.reader(network.text.embed(ids)).split([len(names) for names in ATTRIBUTES], -1)
    losses = []
    for score, field in zip(scores, fields, strict=True):
        truth = field.to(ids.device)[:, None].expand_as(ids)
        losses.append(nn.functional.cross_entropy(score[words], truth[words]))
    return torch.stack(losses).mean()


def captions(scenes: Tensor, chance: random.Random) -> list[str]:
    """One caption per row of `scenes` `[..., 4]`; a chunk keeps its predecessor's words while the scene stays."""
    result = []
    for window in scenes.tolist():
        last: tuple[list[int], str] | None = None
        for row in window:
            if last is None or last[0] != row:
                scene = world.Scene(*(table[i] for table, i in zip(ATTRIBUTES, row, strict=True)))
                last = (row, prompts.caption(scene, chance))
            result.append(last[1])
    return result


@dataclass(frozen=True)
class Data:
    """Training data that a step samples from. `empty` `[backgrounds, C, h, w]`: latents of the bare backgrounds."""

    pool: Pool
    starts: Starts
    empty: Tensor


def rollout_step(
    network: TinyNetwork, own: OwnPasts, count: int, chance: random.Random, generator: torch.Generator
) -> Windows:
    """Extend the next `count` of the network's own streams by a chunk, and return them with the right targets. Mutates:
    own."""

    def flow(past: Tensor, noisy: Tensor, sigma: Tensor, scenes: Tensor) -> Tensor:
        kept = torch.full((len(past), past.shape[1]), CONTEXT_SIGMA, device=past.device)
        noise = loop.noise_like(past, generator)
        seen = sampling.add_noise(past, noise, kept.view(*kept.shape, 1, 1, 1, 1))
        chunks = past.shape[1] + 1
        rows = Rows(list(range(chunks)), [list(range(i + 1)) for i in range(chunks)], sigma, sigma)
        words = captions(scenes[:, None].expand(-1, chunks, -1), chance)
        every = torch.cat([seen, noisy[:, None]], 1).flatten(0, 1)
        levels = torch.cat([kept, sigma[:, None]], 1)
        made = network.flow(Forward(every, levels, network.text.tokens(words), rows))
        newest: Tensor = made.unflatten(0, (len(past), chunks))[:, -1]
        return newest

    return own.turn(count, flow, LEVELS[4 if chance.random() < 0.75 else 2], generator)


def draw(data: Data, batch: int, chance: random.Random, generator: torch.Generator) -> dict[str, Windows]:
    """One step's windows by kind: half of `batch` five chunks long, half as many first chunks again as `batch`, `batch`
    of two chunks, half of `batch` that begin again, and `batch` with a video."""
    (kind,) = chance.choices(list(LONG), list(LONG.values()))
    offset = torch.randint(CHUNKS - 1, (batch,), generator=generator).to(data.pool.device)
    return {
        "video": video_windows(data.pool, batch, chance.randint(0, PAST), generator),
        kind: data.pool.sample(max(1, batch // 2), generator),
        "first": data.starts.sample(batch + batch // 2, generator),
        "next": data.pool.sample(batch, generator).cut(offset, 2),
        "again": corruption.after_nothing(
            data.starts.sample(max(1, batch // 2), generator), data.empty, chance.choice(GONE)
        ),
    }


def lesson_of(
    network: TinyNetwork,
    windows: Windows,
    empty: Tensor,
    kind: str,
    chance: random.Random,
    generator: torch.Generator,
) -> Lesson:
    """The training forward of the windows' rows, those without a target corrupted; `kind` is a key of `ROWS`."""
    rows = ROWS[kind](windows, chance, generator)
    device = windows.latents.device
    sigma, target = rows.sigma.to(device), rows.target.to(device)
    clean = windows.latents[:, rows.chunk]
    noise = loop.noise_like(clean, generator)
    level = sigma.view(*sigma.shape, 1, 1, 1, 1)
    seen = torch.where(
        target.view(level.shape), clean, corruption.corrupt_shapes(windows, empty, generator)[:, rows.chunk]
    )
    if windows.video is not None:
        seen = torch.where(target.view(level.shape), windows.video[:, None], seen)
    noisy = sampling.add_noise(seen, noise, level)
    # from what is shown to what is to come of it; levels below LOWEST have no target
    wanted = (noisy - clean) / level.clamp(min=LOWEST)
    ids = network.text.tokens(captions(windows.scenes, chance)).unflatten(0, windows.scenes.shape[:2])
    ids = ids[:, rows.chunk].flatten(0, 1)
    return Lesson(noisy.flatten(0, 1), sigma, ids, rows, wanted.flatten(0, 1), windows.weight()[:, rows.chunk])


Statistics = Callable[[], tuple[Tensor, Tensor]]


class Learner:
    """A network in training: its optimizer, its running average, and its checkpoint, from which it goes on.
    `statistics` are the latents' mean and deviation, those of the checkpoint where there is one; `smooth` the losses of
    late."""

    def __init__(
        self, network: nn.Module, path: Path, rate: float, device: torch.device, statistics: Statistics
    ) -> None:
        """`statistics` computes what no checkpoint says, and may give the network its weights. Mutates: network."""
        self.network, self.smooth = network, dict[str, Tensor]()
        self.optimizer = loop.Optimizer(network, MATRIX_LR * rate, OTHER_LR * rate, adam=ADAM_PARTS)
        self.progress, self._checkpoint = loop.Progress(), loop.Checkpoint(path)
        state = self._checkpoint.load(device)
        self.statistics = statistics() if state is None else (state["mean"], state["std"])
        self.average = loop.Average(network)
        if state is None:
            return
        network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.weights = state["average"]
        self.progress = loop.Progress(state["step"], state["spent_s"])

    def learn(self, losses: Mapping[str, Tensor], shares: Mapping[str, float], done: float) -> None:
        """One update, `done` of the budget, 0 to 1. Mutates: self, network."""
        total = torch.stack([shares[kind] * loss for kind, loss in losses.items()]).sum()
        self.optimizer.step(total, done, self.progress.step)
        self.average.update(self.network, self.progress.step)
        for kind, loss in losses.items():
            self.smooth[kind] = torch.lerp(self.smooth.get(kind, loss.detach()), loss.detach(), 0.03)

    def tell(self, step: int) -> None:
        """Print the smoothed losses; waits for the device."""
        if loop.rank() == 0:
            values = " ".join(f"{kind} {float(value):.4f}" for kind, value in sorted(self.smooth.items()))
            print(f"denoiser step {step}: {values}", flush=True)

    def save(self, done_steps: int) -> None:
        """Write the checkpoint."""
        self._checkpoint.save(
            {
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": self.average.weights,
                "step": done_steps,
                "spent_s": self.progress.spent_s,
                "mean": self.statistics[0],
                "std": self.statistics[1],
            }
        )

    def finish(self) -> None:
        """Write the checkpoint; the network has the averaged weights then. Mutates: network."""
        self.save(self.progress.step)
        self.network.load_state_dict(self.average.weights)
        self.network.eval()


@dataclass(frozen=True)
class Trained:
    """Result of stage two: the averaged network, and mean and deviation of latents."""

    network: TinyNetwork
    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class Plan:
    """How to train: samples per process and step, a factor on the learning rates, what to begin with: a finished model,
    whose text encoder then stays as it is, or nothing; and whether matrices are multiplied in bfloat16."""

    batch: int = 8
    rate: float = 1.0
    begin: Model | None = None
    bf16: bool = False


def _begin(
    plan: Plan, autoencoder: TAEHV, seed: int, device: torch.device
) -> tuple[TinyNetwork, tuple[Tensor, Tensor]]:
    """The network to train, and mean and standard deviation of the latents."""
    network = TinyNetwork().to(device)
    if plan.begin is None:
        return network, latent_statistics(autoencoder, torch.Generator().manual_seed(seed), device)
    statistics = network.load_model(plan.begin)
    network.encoder.requires_grad_(False)
    return network, statistics


def train(out: Path, autoencoder: TAEHV, budget: loop.Budget, seed: int, device: torch.device, plan: Plan) -> Trained:
    """Train, or go on with, the transformer under `out`. Writes `out/denoiser.pt` every 100 steps."""
    torch.manual_seed(seed)
    network, statistics = _begin(plan, autoencoder, seed, device)
    learner = Learner(network, out / "denoiser.pt", plan.rate, device, lambda: statistics)
    (mean, std), progress = learner.statistics, learner.progress
    pool = Pool(autoencoder, mean, std, POOL, device)
    pool.grow(FIRST_WINDOWS, loop.step_generator(seed + 1, progress.step))
    empty = corruption.empty_latents(autoencoder, mean, std, device)
    starts = Starts(autoencoder, mean, std, device)
    chance = loop.step_generator(seed + 2, progress.step)
    own = OwnPasts(autoencoder, mean, std, starts, STREAMS, chance)
    data = Data(pool, starts, empty)
    for done in loop.steps(budget, progress, "denoiser"):
        generator = loop.step_generator(seed, progress.step)
        shared = random.Random(seed * 1_000_003 + progress.step)
        if progress.step % 2 == 0:
            pool.grow(max(1, plan.batch // 4), generator)
        drawn = draw(data, plan.batch, shared, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.bf16):
            if plan.begin is not None or done >= OWN_FROM:
                drawn["own"] = rollout_step(network, own, plan.batch, shared, generator)
            losses = network.losses(
                {kind: lesson_of(network, some, empty, kind, shared, generator) for kind, some in drawn.items()}
            )
            if plan.begin is None:
                losses["reading"] = reading_loss(network, shared, generator)
        learner.learn(losses, SHARES, done)
        if progress.step % 100 == 99:
            learner.tell(progress.step + 1)
            learner.save(progress.step + 1)
    learner.finish()
    return Trained(network, mean, std)
