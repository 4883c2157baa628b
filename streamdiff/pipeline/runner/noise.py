"""Noise of a session: drawn from its seed, or given as tensors; and prefetched to the device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.sampling import Schedule
from streamdiff.session_state.fields import session_value


class Noise(Protocol):
    """Standard normal noise of one session, on the CPU, so that it is the same for every device; `PrefetchedNoise`
    alone has it on the device."""

    def draw(self, chunk: int, step: int) -> Tensor:
        """Float32 `[C, F, h, w]`, a pure function of (chunk, step): what step 0 receives, what is added
        before a later step, or, for `step` = number of steps, what the clean pass adds where it adds any."""

    def is_unscaled(self, chunk: int) -> bool:
        """True if step 0's noise of `chunk` was supplied and must not be multiplied by the schedule's `noise_scale`."""


@session_value("seeded-noise")
@dataclass(frozen=True)
class SeededNoise:
    """Noise drawn from `seed`; `shape` `[C, F, h, w]` is that of a chunk."""

    shape: tuple[int, int, int, int]
    seed: int

    def draw(self, chunk: int, step: int) -> Tensor:
        return sampling.noise(self.shape, seed=self.seed, chunk=chunk, step=step)

    def is_unscaled(self, chunk: int) -> bool:
        return False


@session_value("tensor-noise")
@dataclass(frozen=True)
class TensorNoise:
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

    def is_unscaled(self, chunk: int) -> bool:
        return chunk < len(self.initial) or self.rest.is_unscaled(chunk)


class PrefetchedNoise:
    """Noise on the device without blocking the host: while a stage computes, a thread draws what is needed next,
    for a GPU into pinned memory, from where it is copied asynchronously.

    torch lends pinned memory again once the copy out of it is through, so there are no buffers here to take turns.
    """

    def __init__(self, noise: Noise, device: torch.device, draws: int, thread: ThreadPoolExecutor) -> None:
        """`draws` per chunk, of steps 0, 1, 2, ...; `thread` is lent."""
        self._noise, self._device, self._draws, self._thread = noise, device, draws, thread
        self._drawn: dict[tuple[int, int], tuple[Future[list[Tensor]], int]] = {}

    def prefetch(self, chunk: int, first: int, end: int | None = None) -> None:
        """Have the noise of steps `first` to `end` (exclusive; None: the chunk's last) drawn by the thread in one task:
        submitting steps one by one costs the host more than drawing them. Does nothing if step `first` is submitted
        already; leaves out steps that do not exist. Mutates: self."""
        steps = range(first, self._draws if end is None else min(end, self._draws))
        if steps and (chunk, first) not in self._drawn:
            drawn = self._thread.submit(lambda: [self._pinned(chunk, step) for step in steps])
            self._drawn |= {(chunk, step): (drawn, place) for place, step in enumerate(steps)}

    def draw(self, chunk: int, step: int) -> Tensor:
        """As `Noise`, on the device. Mutates: self."""
        drawn = self._drawn.pop((chunk, step), None)
        noise = self._pinned(chunk, step) if drawn is None else drawn[0].result()[drawn[1]]
        return noise.to(self._device, non_blocking=True)

    def is_unscaled(self, chunk: int) -> bool:
        return self._noise.is_unscaled(chunk)

    def _pinned(self, chunk: int, step: int) -> Tensor:
        noise = self._noise.draw(chunk, step)
        return noise.pin_memory() if self._device.type == "cuda" else noise
