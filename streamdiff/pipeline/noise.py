"""Where a session's noise comes from: its seed, or tensors that somebody gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.sampling import Schedule


class Noise(Protocol):
    """Standard normal noise of one session."""

    def draw(self, chunk: int, step: int) -> Tensor:
        """Float32 `[C, F, h, w]` on the CPU, a pure function of (chunk, step): what step 0 receives, what is added
        before a later step, or, for `step` = number of steps, what the clean pass adds where it adds any."""


@dataclass(frozen=True)
class SeededNoise:
    """Noise that follows from `seed`; `shape` is that of a chunk."""

    shape: tuple[int, int, int, int]
    seed: int

    def draw(self, chunk: int, step: int) -> Tensor:
        return sampling.noise(self.shape, seed=self.seed, chunk=chunk, step=step)


@dataclass(frozen=True)
class GivenNoise:
    """Noise of the first chunks as tensors: `initial` `[n, C, F, h, w]` for step 0, `renoise` `[n, steps - 1, C, F, h,
    w]` for the later ones, of which chunk c has `schedule.of(c).steps - 1`; what neither has comes from `rest`."""

    initial: Tensor
    renoise: Tensor | None
    schedule: Schedule
    rest: Noise

    def draw(self, chunk: int, step: int) -> Tensor:
        if step == 0 and chunk < len(self.initial):
            return self.initial[chunk]
        if self.renoise is not None and chunk < len(self.renoise) and 0 < step < self.schedule.of(chunk).steps:
            return self.renoise[chunk, step - 1]
        return self.rest.draw(chunk, step)
