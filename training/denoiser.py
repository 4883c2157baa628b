"""Stage two of training the embedded model: the causal transformer, on latents of the trained autoencoder.

Diffusion forcing: every chunk has its own noise level and sees the chunks before it, at theirs. A step adds up losses,
each the flow's mean squared error (decision 0006):

- *window*, five chunks: `staircase`, whose levels fall with age as in a full ring, `clean`, where noisy copies of the
  chunks each see the clean copies of their past, or `anchored`, all at one level, with or without clean anchors;
- *first*: first chunks of streams, alone;
- *next*: a chunk after one clean chunk, at several levels;
- *again*: a chunk after one that lacks a thing, which begins again where streams begin;
- *video*: a chunk whose noisy copies show another scene, whose places and motions it keeps (`video_windows`), after
  another chunk or as the first;
- *single*: chunks of one latent frame, after the finished ones before them, for streams that answer keys sooner;
- *own*: what should follow chunks that the network made itself (`on_policy`), towards the end; *own_staircase*: the
  same, where these stand at the levels of a full ring.

Only where a stream starts or its prompt changes must a chunk be drawn from words; everywhere else it can be copied
from the past. The short kinds hold many such places at a fraction of a window's cost. Things are corrupted in a share
of the chunks that have no target. Training that begins with nothing has one more loss, *reading*, which teaches the
text encoder: every word's embedding must tell the whole scene, so that cross-attention need not search for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from streamdiff.models import sampling
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny.scene import MOTIONS
from training import loop
from training.batches import Pool, TrackEncoder, latent_statistics
from training.learner import Learner, Plan
from training.network import Forward, Lesson, Network
from training.on_policy import CLEAN_PAST, PAST, Flow, OwnPasts
from training.rows import (
    CONTEXT_SIGMA,
    LEVELS,
    LOWEST,
    ROWS,
    Rows,
    causal,
    levels_at,
    newest_steps,
)
from training.scene_rows import COLUMN, FIELD_SIZES, FIELDS
from training.video_windows import VideoPool
from training.windows import CHUNKS, Windows
from training.world.scenes import draw_scenes

KEPT = 2500
"""Windows of each kind that are kept."""
SHARES = {
    "staircase": 0.4, "clean": 0.4, "first": 0.3, "next": 0.4, "again": 0.2, "anchored": 0.3, "video": 0.4, "own": 0.6,
    "own_staircase": 0.4, "reading": 0.1, "single": 0.3,
}  # fmt: skip
LONG = {"staircase": 0.5, "clean": 0.3, "anchored": 0.2}
"""How often a step's windows of five chunks are of which kind."""
FIRST_SINGLES = 0.3
"""Share of the steps whose chunks of one latent frame begin a stream."""
UNSAID = -1
"""In place of a field's value, where the sentence does not say it."""
STREAMS = 24
"""The network's own streams, at least."""
ON_STAIRS = 0.5
"""Share of the chunks that the network makes as `staircase` does."""
PLAYED = 64
"""A step plays a quarter as many of them as it has samples, but all up to this number: looking where their things are
takes several times as long as learning from them."""


@dataclass(frozen=True)
class Schedule:
    """From when on, 0 to 1, whole windows are trained on (before, twice as many pairs of chunks, which take less time),
    and the network's own streams (such a step takes twice as long)."""

    whole_from: float
    own_from: float


FROM_NOTHING, FROM_MODEL = Schedule(0.5, 0.85), Schedule(0.0, 0.7)


@dataclass(frozen=True)
class Filling:
    """How pools grow: windows of five chunks, of first ones, of lost things and of videos, at the start and then after
    every so many steps. On a CPU a window takes as long as half a step."""

    begin: tuple[int, int, int, int]
    every: int
    more: tuple[int, int, int, int]


FILLING = {
    "cpu": Filling((64, 128, 32, 32), 2, (2, 2, 1, 1)),
    "cuda": Filling((960, 640, 384, 384), 32, (192, 128, 96, 96)),
}


def reading_loss(network: Network, generator: torch.Generator, batch: int = 64) -> Tensor:
    """Cross-entropy of all columns of random scenes, read off the embedding of every word of their sentences; what
    cannot be said (columns of a second thing that is not there, the speed of what stands still) does not count."""
    scenes = draw_scenes(batch, generator)
    said = torch.stack([is_said(scenes, column) for column in range(len(FIELDS))], 1)
    ids = network.tokens(scenes)
    wanted = torch.where(said, scenes, UNSAID).to(ids.device)[:, None].expand(-1, ids.shape[1], -1)
    wanted = torch.where((ids != 0)[:, :, None], wanted, UNSAID).flatten(0, 1)
    scores = network.reader(network.text.embed(ids)).flatten(0, 1).split(list(FIELD_SIZES), -1)
    losses = [
        nn.functional.cross_entropy(score, truth, ignore_index=UNSAID)
        for score, truth in zip(scores, wanted.unbind(1), strict=True)
    ]
    return torch.stack(losses).mean()


def is_said(scenes: Tensor, column: int) -> Tensor:
    """Whether the sentence of each scene `[N, fields]` says the value of `column`, bool `[N]`."""
    name = FIELDS[column]
    says = torch.ones(len(scenes), dtype=torch.bool)
    if name.startswith("second_"):
        says = scenes[:, COLUMN["second"]] == 1
    if name.endswith("speed"):
        says = says & (scenes[:, COLUMN[name.replace("speed", "motion")]] != MOTIONS.index("still"))
    return says


def rollout_step(
    network: Network, own: OwnPasts, count: int, chance: random.Random, generator: torch.Generator
) -> Windows:
    """Extend the next `count` of the network's own streams by a chunk, in `clean` or, in a share `ON_STAIRS` of the
    calls, as `staircase` does, and return them with the right targets. Mutates: own."""
    steps, on_stairs = 4 if chance.random() < 0.75 else 2, chance.random() < ON_STAIRS
    return own.turn(count, stream_flow(network, steps, on_stairs, generator), LEVELS[steps], generator)


def stream_flow(network: Network, steps: int, on_stairs: bool, generator: torch.Generator) -> Flow:
    """How the network makes a chunk of a stream in `steps`: in `clean` or, `on_stairs`, as `staircase` does."""
    chunks = (PAST if on_stairs else CLEAN_PAST) + 1

    def levels(step: int) -> Tensor:
        """Of the past and, at `step`, the new chunk, `[chunks]`."""
        at = newest_steps(torch.tensor([step]), chunks)[0]
        found = levels_at(at if on_stairs else at.where(at == step, steps), steps)
        found[:-1].clamp_(min=CONTEXT_SIGMA)
        return found

    def flow(past: Tensor, noisy: Tensor, step: int, ids: Tensor, controls: Tensor) -> Tensor:
        past, sigma = past[:, 1 - chunks :], levels(step).to(past.device, non_blocking=True).expand(len(past), -1)
        noise = loop.noise_like(past, generator)
        seen = sampling.add_noise(past, noise, sigma[:, :-1, None, None, None, None])
        every = torch.cat([seen, noisy[:, None]], 1).flatten(0, 1)
        words = ids[:, None].expand(-1, chunks, -1).flatten(0, 1)
        rows = Rows(list(range(chunks)), causal(chunks), sigma, sigma)
        made = network.flow(Forward(every, sigma, words, controls[:, -chunks:].flatten(0, 1), rows))
        newest: Tensor = made.unflatten(0, sigma.shape)[:, -1]
        return newest

    return flow


def draw(
    pools: Sequence[Pool], batch: int, whole: bool, chance: random.Random, generator: torch.Generator
) -> dict[str, Windows]:
    """One step's windows by kind: half as many first chunks again as `batch`; half of `batch` of lost things, of
    videos, and of chunks of one latent frame; with `whole`, half of `batch` five chunks long and `batch` of two chunks;
    without, twice `batch` of two chunks, each with `COPIES` targets. `pools` are as in `Filling`."""
    pool, firsts, lost, videos = pools
    (kind,) = chance.choices(list(LONG), list(LONG.values()))
    pairs = batch if whole else 2 * batch
    offset = torch.randint(CHUNKS - 1, (pairs,), generator=generator)
    drawn = {
        "first": firsts.sample(batch + batch // 2, generator),
        "again": lost.sample(max(1, batch // 2), generator),
        "video": videos.sample(max(1, batch // 2), generator),
        "next": pool.sample(pairs, generator).cut(offset, 2),
    }
    if chance.random() < FIRST_SINGLES:
        singles = firsts.sample(max(1, batch // 2), generator)
    else:
        singles = pool.sample(max(1, batch // 2), generator)
        singles = singles.cut(torch.randint(CHUNKS - 2, (len(singles.start),), generator=generator), 3)
    drawn["single"] = singles.singles()
    return {kind: pool.sample(max(1, batch // 2), generator), **drawn} if whole else drawn


def lesson_of(windows: Windows, kind: str, chance: random.Random, generator: torch.Generator) -> Lesson:
    """The training forward of the windows' rows, those without a target corrupted; `kind` is a key of `ROWS`."""
    rows = ROWS[kind](windows, chance, generator)
    device = windows.latents.device
    sigma, target, chunk = (
        each.to(device, non_blocking=True) for each in (rows.sigma, rows.target, torch.tensor(rows.chunk))
    )
    clean = windows.latents[:, chunk]
    noise = loop.noise_like(clean, generator)
    level = sigma.view(*sigma.shape, 1, 1, 1, 1)
    seen = torch.where(target.view(level.shape), clean, windows.corrupted(generator)[:, chunk])
    if windows.video is not None:
        seen = torch.where(target.view(level.shape), windows.video[:, None], seen)
    noisy = sampling.add_noise(seen, noise, level)
    # from what is shown to what is to come of it; levels below LOWEST have no target
    wanted = (noisy - clean) / level.clamp(min=LOWEST)
    ids, controls = windows.ids[:, chunk].flatten(0, 1), windows.controls[:, chunk].flatten(0, 1)
    return Lesson(noisy.flatten(0, 1), sigma, ids, controls, rows, wanted.flatten(0, 1), windows.weight()[:, chunk])


def train(out: Path, autoencoder: TAEHV, budget: loop.Budget, seed: int, device: torch.device, plan: Plan) -> Learner:
    """Train, or go on with, the transformer under `out`. Writes `out/denoiser.pt` every 50 steps; a run that is told to
    end (`loop.stopping`) writes its windows too, which take minutes of a CPU to make."""
    torch.manual_seed(seed)
    network = Network().to(device)
    chance = torch.Generator().manual_seed(seed)
    if device.type == "cuda":
        network.denoiser.compile()
    learner = Learner(network, out, plan, device, lambda: latent_statistics(autoencoder, chance, device))
    mean, std = learner.statistics
    encode = TrackEncoder(autoencoder, mean, std, network.tokens)
    firsts, lost = Pool(encode, KEPT, chunks=1, starts=1.0), Pool(encode, KEPT, chunks=2, starts=0.0, lost=1.0)
    pools = (Pool(encode, KEPT), firsts, lost, VideoPool(encode, KEPT))
    filling = FILLING[device.type]
    own: OwnPasts | None = None
    schedule = FROM_NOTHING if plan.begin is None else FROM_MODEL

    def grow(counts: Sequence[int], generator: torch.Generator) -> None:
        for some, count in zip(pools, counts, strict=True):
            some.grow(count, generator)

    def losses(done: float, shared: random.Random, generator: torch.Generator) -> dict[str, Tensor]:
        nonlocal own
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.bf16):
            if learner.progress.step % filling.every == 0:
                grow(filling.more, generator)
            drawn = draw(pools, plan.batch, done >= schedule.whole_from, shared, generator)
            if done >= schedule.own_from:
                played = min(plan.batch, max(PLAYED, plan.batch // 4))
                own = own or OwnPasts(encode, max(STREAMS, 2 * played), generator)
                drawn["own_staircase"] = windows = rollout_step(network, own, played, shared, generator)
                drawn["own"] = windows.cut(torch.full((len(windows.start),), PAST - CLEAN_PAST), CLEAN_PAST + 1)
            found = network.losses({kind: lesson_of(some, kind, shared, generator) for kind, some in drawn.items()})
            return found if plan.begin else found | {"reading": reading_loss(network, generator)}

    with torch.autocast(device.type, torch.bfloat16, enabled=plan.bf16):
        kept = [out / f"windows-{loop.rank()}-{number}.pt" for number in range(len(pools))]
        if all(file.is_file() for file in kept):
            for some, file in zip(pools, kept, strict=True):
                some.load(file)
        else:
            grow(filling.begin, loop.step_generator(seed + 1, learner.progress.step))
    learner.train(budget, seed, 50, SHARES, losses)
    if loop.stopping.is_set():
        for some, file in zip(pools, kept, strict=True):
            some.save(file)
    return learner
