"""Which rows a training forward has: for every row its chunk of the window, its noise level, what it sees, and whether
it has a target."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models import sampling
from training.windows import CHUNKS, Windows

LEVELS = {4: sampling.schedule(4), 2: sampling.schedule(2)}
CONTEXT_SIGMA = 0.25
"""The level at which a stream remembers a finished chunk (decision 0006)."""
LOWEST = 0.2
"""The least noise that a step is trained on: with less, what is left to predict is detail that neither text nor past
determines, and its error is large whatever is learnt."""
COPIES = 2
"""Noisy copies of the last chunk in one window of *next*."""
VIDEO_SIGMA = (0.3, 0.8)
"""Levels between which a video that comes in is trained on."""
WITHOUT_PAST = 0.3
"""Share of the forwards whose videos begin a stream."""


@dataclass(frozen=True)
class Rows:
    """One forward's worth of work: for every row its chunk of the window, sigma, and whether it has a target."""

    chunk: list[int]
    visible: list[list[int]]
    sigma: Tensor  # [B, rows]
    target: Tensor  # bool [B, rows]


def causal(count: int) -> list[list[int]]:
    """The rows that each of `count` rows sees, where all see those before them and themselves."""
    return [list(range(i + 1)) for i in range(count)]


def staircase_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Levels that rise from clean to noise along the window, as chunks of one session stand in the ring.

    Where a window starts a stream its first chunks may be anywhere on the stairs; elsewhere the first chunk must be
    clean, since the past it would need is not in the window.
    """
    batch = windows.latents.shape[0]
    steps = 4 if chance.random() < 0.75 else 2
    newest = torch.randint(1000, (batch,), generator=generator)
    ahead = torch.where(newest < 600, 0, newest % 4) if steps == 4 else newest % 2
    base = torch.where(windows.start, torch.randint(steps + 2, (batch,), generator=generator), CHUNKS - 1 + ahead)
    step = base[:, None] - torch.arange(CHUNKS)
    target = (step >= 0) & (step < steps)
    sigma = _context_noise(levels_at(step, steps), generator)
    return Rows(list(range(CHUNKS)), causal(CHUNKS), sigma, target)


def levels_at(step: Tensor, steps: int) -> Tensor:
    """The noise levels at `step` of `steps`, of any shape; 0 from the last one on."""
    return torch.tensor([*LEVELS[steps], 0.0])[step.clamp(0, steps)]


def newest_steps(newest: Tensor, chunks: int) -> Tensor:
    """At which step each of `chunks` chunks in a full ring is, `[B, chunks]`, where the newest is at `newest` `[B]`."""
    return newest[:, None] + torch.arange(chunks - 1, -1, -1)


def newest_on_stairs_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Levels as in a full ring. Only the newest chunk has a target: what the others show is there already."""
    batch, chunks = windows.latents.shape[:2]
    steps = 4 if chance.random() < 0.75 else 2
    step = newest_steps(torch.randint(steps, (batch,), generator=generator), chunks)
    target = (torch.arange(chunks) == chunks - 1).repeat(batch, 1)
    return Rows(list(range(chunks)), causal(chunks), _context_noise(levels_at(step, steps), generator), target)


def clean_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3 and noisy copies of 0..4; a noisy copy sees the clean past and itself."""
    levels = _step_noise(len(windows.latents), CHUNKS, generator)
    return _both_copies(windows, levels, [[*range(i), CHUNKS - 1 + i] for i in range(CHUNKS)], generator)


def anchored_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3 and noisy copies of 0..4, all at one level, as at one step of `same_step`. Anchors
    are seen clean where a stream's are: the first chunk by all, every Nth from step S - k on by the chunk k later."""
    steps = 4 if chance.random() < 0.75 else 2
    step, every = chance.randrange(steps), chance.choice((None, 1, 2, 4))
    offset, sink = chance.randrange(every or 1), chance.random() < 0.5

    def seen(row: int, chunk: int) -> int:
        anchor = every is not None and chunk % every == offset and row - chunk >= steps - step
        clean = chunk < row and ((sink and chunk == 0) or anchor)
        return chunk if clean else CHUNKS - 1 + chunk

    levels = torch.full((len(windows.latents), CHUNKS), LEVELS[steps][step])
    return _both_copies(windows, levels, [[seen(i, chunk) for chunk in range(i + 1)] for i in range(CHUNKS)], generator)


def _both_copies(windows: Windows, levels: Tensor, visible: list[list[int]], generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3, which see those before them, and noisy copies of 0..4, at `levels` `[B, CHUNKS]`,
    which see the rows `visible`.

    A window that does not start a stream has no target in its first chunk, whose past is not there.
    """
    batch, past = len(levels), CHUNKS - 1
    target = (torch.arange(past + CHUNKS) >= past).repeat(batch, 1)
    target[:, past] = windows.start
    sigma = _context_noise(torch.cat([torch.zeros(batch, past), levels], 1), generator)
    return Rows([*range(past), *range(CHUNKS)], [*causal(past), *visible], sigma, target)


def video_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Like `next_rows`, at levels that leave something of the video to be seen; in a share `WITHOUT_PAST` of the
    calls without the past, as in the first chunk of a stream."""
    rows = next_rows(windows, chance, generator)
    low, high = VIDEO_SIGMA
    level = low + (high - low) * torch.rand(rows.sigma.shape, generator=generator)
    if chance.random() < WITHOUT_PAST:
        visible = [[copy] for copy in range(COPIES)]
        return Rows(rows.chunk[-COPIES:], visible, level[:, -COPIES:], rows.target[:, -COPIES:])
    return Rows(rows.chunk, rows.visible, torch.where(rows.target, level, rows.sigma), rows.target)


def first_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """First chunks of streams, one a window, that see nothing but themselves."""
    sigma = _step_noise(windows.latents.shape[0], 1, generator)
    return Rows([0], [[0]], sigma, torch.ones_like(sigma, dtype=torch.bool))


def next_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Of all chunks but the last one clean copies, and `COPIES` noisy copies of the last, each of which sees them."""
    batch, chunks = windows.latents.shape[:2]
    past = chunks - 1
    sigma = torch.cat([torch.zeros(batch, past), _step_noise(batch, COPIES, generator)], 1)
    target = torch.arange(past + COPIES).expand(batch, -1) >= past
    visible = causal(past) + [[*range(past), past + copy] for copy in range(COPIES)]
    return Rows([*range(past), *[past] * COPIES], visible, _context_noise(sigma, generator), target)


def single_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Chunks of one latent frame (`Windows.singles`): of all but the last one clean copies, and noisy copies of the
    last three, each of which sees the clean ones before it."""
    batch, chunks = windows.latents.shape[:2]
    past, last = chunks - 1, list(range(chunks - 3, chunks))
    sigma = torch.cat([torch.zeros(batch, past), _step_noise(batch, len(last), generator)], 1)
    target = torch.arange(past + len(last)).expand(batch, -1) >= past
    visible = causal(past) + [[*range(chunk), past + copy] for copy, chunk in enumerate(last)]
    return Rows([*range(past), *last], visible, _context_noise(sigma, generator), target)


def _step_noise(batch: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Levels `[batch, chunks]`: mostly those of the four sampling steps, the others anywhere above `LOWEST`."""
    levels = torch.tensor(LEVELS[4])[torch.randint(4, (batch, chunks), generator=generator)]
    anywhere = LOWEST + (1 - LOWEST) * torch.rand(batch, chunks, generator=generator)
    return torch.where(torch.rand(batch, chunks, generator=generator) < 0.85, levels, anywhere)


def _context_noise(sigma: Tensor, generator: torch.Generator) -> Tensor:
    """Lift half of the clean levels to at most 0.3: a finished chunk is remembered at 0.25 (decision 0006)."""
    lifted = 0.3 * torch.rand(sigma.shape, generator=generator)
    pick = torch.rand(sigma.shape, generator=generator) < 0.5
    return torch.where((sigma == 0) & pick, lifted, sigma)


ROWS = {
    "staircase": staircase_rows, "clean": clean_rows, "first": first_rows, "next": next_rows, "again": next_rows,
    "own": next_rows, "own_staircase": newest_on_stairs_rows, "anchored": anchored_rows, "video": video_rows,
    "single": single_rows,
}  # fmt: skip
