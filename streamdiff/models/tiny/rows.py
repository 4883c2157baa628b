"""What the transformer is shown in one training forward: rows of chunks, what each sees, and how noisy each is."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.tiny.windows import CHUNKS, Windows

LEVELS = {4: sampling.schedule(4), 2: sampling.schedule(2)}
CONTEXT_SIGMA = 0.25
"""The level at which a stream remembers a finished chunk (decision 0011)."""
COPIES = 2


@dataclass(frozen=True)
class Rows:
    """One forward's worth of work: for every row its chunk of the window, sigma, and whether it has a target."""

    chunk: list[int]
    visible: list[list[int]]
    sigma: Tensor  # [B, rows]
    target: Tensor  # bool [B, rows]


def staircase_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Levels that rise from clean to noise along the window, as chunks of one session stand in the ring.

    Where a window starts a stream its first chunks may be anywhere on the stairs; elsewhere the first chunk must be
    clean, since the past it would need is not in the window.
    """
    batch = windows.latents.shape[0]
    steps = 4 if chance.random() < 0.75 else 2
    levels = torch.tensor([*LEVELS[steps], 0.0])
    newest = torch.randint(1000, (batch,), generator=generator)
    ahead = torch.where(newest < 600, 0, newest % 4) if steps == 4 else newest % 2
    base = torch.where(windows.start.cpu(), torch.randint(steps + 2, (batch,), generator=generator), CHUNKS - 1 + ahead)
    step = base[:, None] - torch.arange(CHUNKS)
    sigma = levels[step.clamp(0, steps)]
    target = (step >= 0) & (step < steps)
    return Rows(
        list(range(CHUNKS)), [list(range(i + 1)) for i in range(CHUNKS)], _context_noise(sigma, generator), target
    )


def clean_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3 and noisy copies of 0..4; a noisy copy sees the clean past and itself."""
    batch = windows.latents.shape[0]
    past = CHUNKS - 1
    sigma = torch.cat([torch.zeros(batch, past), _step_noise(batch, CHUNKS, generator)], 1)
    target = torch.cat([torch.zeros(batch, past, dtype=torch.bool), torch.ones(batch, CHUNKS, dtype=torch.bool)], 1)
    target[:, past] = windows.start.cpu()
    visible = [list(range(i + 1)) for i in range(past)] + [[*range(i), past + i] for i in range(CHUNKS)]
    return Rows([*range(past), *range(CHUNKS)], visible, _context_noise(sigma, generator), target)


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
    visible = [list(range(i + 1)) for i in range(past)] + [[*range(past), past + copy] for copy in range(COPIES)]
    return Rows([*range(past), *[past] * COPIES], visible, _context_noise(sigma, generator), target)


def _step_noise(batch: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Levels `[batch, chunks]`: mostly those of the four sampling steps, the others anywhere."""
    levels = torch.tensor(LEVELS[4])[torch.randint(4, (batch, chunks), generator=generator)]
    anywhere = torch.rand(batch, chunks, generator=generator).clamp(min=0.02)
    return torch.where(torch.rand(batch, chunks, generator=generator) < 0.85, levels, anywhere)


def _context_noise(sigma: Tensor, generator: torch.Generator) -> Tensor:
    """Lift half of the clean levels to at most 0.3: a finished chunk is remembered at 0.25 (decision 0011)."""
    lifted = 0.3 * torch.rand(sigma.shape, generator=generator)
    pick = torch.rand(sigma.shape, generator=generator) < 0.5
    return torch.where((sigma == 0) & pick, lifted, sigma)


ROWS = {
    "staircase": staircase_rows, "clean": clean_rows, "first": first_rows, "next": next_rows, "again": next_rows,
    "own": next_rows,
}  # fmt: skip
