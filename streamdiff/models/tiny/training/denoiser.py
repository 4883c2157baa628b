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
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

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
    LatentEncoder,
    Pool,
    Rows,
    Starts,
    Windows,
    WindowsT,
    causal,
    latent_statistics,
)
from streamdiff.models.tiny.training.network import Forward, Lesson, TinyNetwork
from streamdiff.models.tiny.training.on_policy import OwnPasts, PlayedStreams
from streamdiff.models.tiny.training.video_windows import PAST, video_windows

NetworkT = TypeVar("NetworkT", bound=TinyNetwork)
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
    fields = [torch.randint(len(names), (batch,), generator=generator) for names in world.ATTRIBUTES]
    ids = network.text.tokens(captions(torch.stack(fields, -1)[:, None], chance))
    words = ids != 0
    scores = network.reader(network.text.embed(ids)).split([len(names) for names in world.ATTRIBUTES], -1)
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
                scene = world.Scene(*(table[i] for table, i in zip(world.ATTRIBUTES, row, strict=True)))
                last = (row, prompts.caption(scene, chance))
            result.append(last[1])
    return result


def rollout_step(
    network: TinyNetwork,
    own: PlayedStreams[WindowsT],
    count: int,
    chance: random.Random,
    generator: torch.Generator,
    ids_of: Callable[[Tensor, int], Tensor],
) -> WindowsT:
    """Extend the next `count` of the network's own streams by a chunk, and return them with the right targets. `ids_of`
    gives the ids `[B * chunks, tokens]` of what the network is told of streams, for so many chunks. Mutates: own."""

    def flow(past: Tensor, noisy: Tensor, sigma: Tensor, told: Tensor) -> Tensor:
        kept = torch.full((len(past), past.shape[1]), CONTEXT_SIGMA, device=past.device)
        noise = loop.noise_like(past, generator)
        seen = sampling.add_noise(past, noise, kept.view(*kept.shape, 1, 1, 1, 1))
        chunks = past.shape[1] + 1
        rows = Rows(list(range(chunks)), causal(chunks), sigma, sigma)
        every = torch.cat([seen, noisy[:, None]], 1).flatten(0, 1)
        levels = torch.cat([kept, sigma[:, None]], 1)
        made = network.flow(Forward(every, levels, ids_of(told, chunks), rows))
        newest: Tensor = made.unflatten(0, (len(past), chunks))[:, -1]
        return newest

    return own.turn(count, flow, LEVELS[4 if chance.random() < 0.75 else 2], generator)


def draw(
    pool: Pool, starts: Starts, empty: Tensor, batch: int, chance: random.Random, generator: torch.Generator
) -> dict[str, Windows]:
    """One step's windows by kind: half of `batch` five chunks long, half as many first chunks again as `batch`, `batch`
    of two chunks, half of `batch` that begin again, and `batch` with a video."""
    (kind,) = chance.choices(list(LONG), list(LONG.values()))
    offset = torch.randint(CHUNKS - 1, (batch,), generator=generator)
    return {
        "video": video_windows(pool.encode, batch, chance.randint(0, PAST), generator),
        kind: pool.sample(max(1, batch // 2), generator),
        "first": starts.sample(batch + batch // 2, generator),
        "next": pool.sample(batch, generator).cut(offset, 2),
        "again": corruption.after_nothing(starts.sample(max(1, batch // 2), generator), empty, chance.choice(GONE)),
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
LossesOf = Callable[[float, random.Random, torch.Generator], Mapping[str, Tensor]]
"""Of the share of the budget that is done, 0 to 1, and the step's randomness: one that all processes share, and one of
this process."""


@dataclass(frozen=True)
class Plan:
    """How to train: samples per process and step, a factor on the learning rates, what to begin with: a finished model,
    whose text encoder then stays as it is, or nothing; whether matrices are multiplied in bfloat16; and how much of
    `begin`'s weights is in what comes out, 0 to 1."""

    batch: int = 8
    rate: float = 1.0
    begin: Model | None = None
    bf16: bool = False
    blend: float = 0.0


class Learner(Generic[NetworkT]):
    """A network in training: its optimizer, its running average, and its checkpoint, from which it goes on.
    `statistics` are the latents' mean and deviation `[C]`, those of the checkpoint where there is one; `smooth` the
    losses of late."""

    def __init__(self, network: NetworkT, out: Path, plan: Plan, device: torch.device, statistics: Statistics) -> None:
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


def train(
    out: Path, autoencoder: TAEHV, budget: loop.Budget, seed: int, device: torch.device, plan: Plan
) -> Learner[TinyNetwork]:
    """Train, or go on with, the transformer under `out`. Writes `out/denoiser.pt` every 100 steps."""
    torch.manual_seed(seed)
    network = TinyNetwork().to(device)
    chance = torch.Generator().manual_seed(seed)
    learner = Learner(network, out, plan, device, lambda: latent_statistics(autoencoder, chance, device))
    encode, first = LatentEncoder(autoencoder, *learner.statistics), learner.progress.step
    pool, starts = Pool(encode, POOL), Starts(encode)
    pool.grow(FIRST_WINDOWS, loop.step_generator(seed + 1, first))
    empty = corruption.empty_latents(encode)
    own = OwnPasts(encode, starts, STREAMS, loop.step_generator(seed + 2, first))

    def losses(done: float, shared: random.Random, generator: torch.Generator) -> dict[str, Tensor]:
        def ids_of(scenes: Tensor, chunks: int) -> Tensor:
            return network.text.tokens(captions(scenes[:, None].expand(-1, chunks, -1), shared))

        if learner.progress.step % 2 == 0:
            pool.grow(max(1, plan.batch // 4), generator)
        drawn = draw(pool, starts, empty, plan.batch, shared, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.bf16):
            if plan.begin is not None or done >= OWN_FROM:
                drawn["own"] = rollout_step(network, own, plan.batch, shared, generator, ids_of)
            found = network.losses(
                {kind: lesson_of(network, some, empty, kind, shared, generator) for kind, some in drawn.items()}
            )
            return found if plan.begin else found | {"reading": reading_loss(network, shared, generator)}

    learner.train(budget, seed, 100, SHARES, losses)
    if plan.begin is not None:
        loop.blend(network.transformer, plan.begin.denoiser.model, plan.blend)
    return learner
