"""Streams in float64 from the published formulas alone: no class of the product, none of diffusers, no rolling cache.

Every (chunk, step) is computed from what the KV context says it sees; nothing is ever overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.pipeline.float64_wan import PlainWan, attend, rotated

Layers = list[tuple[Tensor, Tensor]]
"""Keys, not rotated, and values of each block `[tokens, H, d]`."""


@dataclass
class PlainStream:
    """One stream; its relative window holds whole chunks: `window` latest ones, itself included, and before them the
    first `sink`. `levels(chunk, step)` are timesteps and noise levels `[F]` of a step; `start(chunk)` is what its first
    one receives, `renoise(chunk, step)` what is added before a later one. `given` are finished chunks. At the clean
    pass, number `steps`, the model is told `context` (timestep, noise level)."""

    model: PlainWan
    text: Tensor
    steps: int
    kv_context: str
    window: int
    sink: int
    levels: Mapping[tuple[int, int], tuple[Tensor, Tensor]]
    start: Mapping[int, Tensor]
    noise: Mapping[tuple[int, int], Tensor]
    given: Sequence[Tensor] = ()
    context: tuple[float, float] = (0.0, 0.0)
    _done: dict[tuple[int, int], tuple[Tensor, Layers]] = field(default_factory=dict)

    def latents(self, chunk: int) -> Tensor:
        """x0 `[C, F, h, w]`, float64."""
        return self.given[chunk].double() if chunk < len(self.given) else self._x0(chunk, self.steps - 1)

    def _x0(self, chunk: int, step: int) -> Tensor:
        """x0 as a step leaves it."""
        if chunk < len(self.given):
            return self.given[chunk].double()
        return self._input(chunk, step) - self._sigma(chunk, step) * self._row(chunk, step)[0]

    def _sigma(self, chunk: int, step: int) -> Tensor:
        return self.levels[chunk, step][1].double()[:, None, None]

    def _input(self, chunk: int, step: int) -> Tensor:
        if step == self.steps:
            level = 0.0 if chunk < len(self.given) else self.context[1]
            clean = self._x0(chunk, step - 1)
            return (1 - level) * clean + level * self.noise[chunk, step].double() if level else clean
        if step == 0 and chunk >= len(self.given):
            return self.start[chunk].double()
        sigma = self._sigma(chunk, step)
        return (1 - sigma) * self._x0(chunk, step - 1) + sigma * self.noise[chunk, step].double()

    def _row(self, chunk: int, step: int) -> tuple[Tensor, Layers]:
        """Flow, and keys and values, of one step."""
        if (chunk, step) not in self._done:
            frames = self.given[0].shape[1] if len(self.given) else next(iter(self.start.values())).shape[1]
            if step < self.steps:
                timesteps = self.levels[chunk, step][0]
            else:
                timesteps = torch.full((frames,), 0.0 if chunk < len(self.given) else self.context[0])
            seen = [self._row(other, self._seen_at(chunk, step, other))[1] for other in self._visible(chunk)]
            self._done[chunk, step] = self._flow(self._input(chunk, step), timesteps, seen)
        return self._done[chunk, step]

    def _flow(self, latents: Tensor, timesteps: Tensor, before: Sequence[Layers]) -> tuple[Tensor, Layers]:
        """The flow, and keys and values; `before` are those that are seen, oldest first: all stand at positions 0, 1,
        2, ..."""
        _, frames, height, width = latents.shape
        own: Layers = []

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own.append((key, value))
            keys, values = (torch.cat([*(each[layer][i] for each in before), own[layer][i]]) for i in (0, 1))
            first = len(keys) * frames // len(query) - frames
            query, keys = (rotated(x, at, height // 2, width // 2) for x, at in ((query, first), (keys, 0)))
            return attend(query, keys, values)

        return self.model.flow(latents, timesteps, self.text, attention), own

    def _visible(self, chunk: int) -> list[int]:
        """Earlier chunks that a chunk sees."""
        first = max(self.sink, chunk - self.window + 1)
        return [*range(min(self.sink, chunk)), *range(first, chunk)]

    def _seen_at(self, chunk: int, step: int, other: int) -> int:
        """The step at which an earlier chunk is seen."""
        if self.kv_context == "same_step":
            return step
        if self.kv_context == "clean" or other < len(self.given):
            return self.steps
        return min(step + chunk - other, self.steps)
