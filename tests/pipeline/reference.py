"""Streams the plain way: no stages, no scheduler, no ring, no cache.

Every row (chunk, step) is computed from scratch, together with all rows it depends on, in one forward whose attention
says row by row what is seen. What a row sees is written down here once more, from the definition of the KV contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.models.transformer import rope
from streamdiff.models.transformer.wan import KeyValue, attend

Row = tuple[int, int]  # (chunk, step); step == steps is the clean pass


Sight = tuple[Row, Sequence[int]]
"""A row and those of its latent frames that are seen."""


def window(model: Model, chunk: int, kv_context: str) -> list[tuple[int, list[int]]]:
    """Chunks that `chunk` sees, and which of their latent frames: those of the sink, the newest that fit, its own."""
    spec = model.spec
    total = (spec.clean_window_latents if kv_context == "clean" else None) or spec.window_latents
    per, sink, end = spec.chunk_latents, spec.sink_latents, (chunk + 1) * spec.chunk_latents
    seen = [f for f in range(end) if f < sink or f >= end - (total - sink)]
    chunks = sorted({f // per for f in seen})
    return [(c, [f - c * per for f in seen if f // per == c]) for c in chunks]


def sees(
    model: Model, row: Row, steps: int, kv_context: str, extra: int = 0, then: tuple[int, int] | None = None
) -> list[Sight]:
    """What `row` attends to, oldest first, itself last. The first chunk has `extra` more steps: it is seen when it has
    as many steps before it as another chunk would. With `then` = (chunk, steps) chunks from that one on have so many
    steps: they see those before it finished, or in `same_step` at the step whose noise was nearest."""
    chunk, step = row
    together = model.spec.first_chunks
    if chunk < together:
        # Those that are made together see each other, wherever they are, and nothing else.
        return [((c, step), frames) for c, frames in window(model, together - 1, kv_context)]
    if then is not None and chunk >= then[0]:
        before, steps = steps, then[1]
        old, new = (sampling.schedule(count, model.spec.shift) for count in (before, steps))
        nearest = min(range(before), key=lambda s: abs(old[s] - new[min(step, steps - 1)]))
        return [
            ((c, nearest if kv_context == "same_step" else before), frames) if c < then[0] else ((c, seen), frames)
            for (c, seen), frames in sees(model, row, steps, kv_context, extra)
        ]
    at: dict[str, Callable[[int], int]] = {
        "clean": lambda distance: steps,
        "staircase": lambda distance: min(step + distance, steps),
        "same_step": lambda distance: step,
    }
    if together > 1:  # whole before another begins, and seen as its last pass left it
        whole = steps - 1 if kv_context == "same_step" else steps
        return [
            ((c, step if c == chunk else whole if c < together else at[kv_context](chunk - c)), frames)
            for c, frames in window(model, chunk, kv_context)
        ]
    return [
        ((c, at[kv_context](chunk - c) + extra * (c == 0) if c < chunk else step), frames)
        for c, frames in window(model, chunk, kv_context)
    ]


@dataclass
class Explicit:
    """Attention over rows given by number: row i sees rows `seen[i]`, wholly or, as (row, frames), some of their latent
    frames. All that it sees stands at positions 0, 1, 2, ..., or with `chunks`, the number of each row's, at the
    positions in the stream."""

    seen: Sequence[Sequence[int | tuple[int, Sequence[int]]]]
    frames: int
    grid: tuple[int, int]
    chunks: Sequence[int] | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = []
        per = self.grid[0] * self.grid[1]
        frame_keys, frame_values = (x.unflatten(1, (self.frames, per)) for x in (key, value))
        for row, seen in enumerate(self.seen):
            whole = [each if isinstance(each, tuple) else (each, range(self.frames)) for each in seen]
            pairs = [(other, frame) for other, frames in whole for frame in frames]
            keys = torch.cat([frame_keys[pair] for pair in pairs])
            values = torch.cat([frame_values[pair] for pair in pairs])
            chunks = self.chunks
            places = [i if chunks is None else chunks[r] * self.frames + f for i, (r, f) in enumerate(pairs)]
            table = rope.table(torch.tensor(places), *self.grid, query.shape[-1])
            own = pairs.index((row, 0)) * per  # the last, but among chunks that are made together
            turned = rope.rotate(query[row], table[own : own + self.frames * per])
            mixed.append(attend(turned[None], rope.rotate(keys, table)[None], values[None]))
        return torch.cat(mixed)


class Reference:
    """One stream. `text(chunk)` is the text in force when the chunk was admitted; `first_steps` are those of the first
    chunk; `then`: see `sees`."""

    def __init__(
        self,
        model: Model,
        text: Callable[[int], str],
        *,
        seed: int,
        steps: int,
        kv_context: str,
        first_steps: int | None = None,
        then: tuple[int, int] | None = None,
    ) -> None:
        self.model, self.text, self.seed = model, text, seed
        self.steps, self.kv_context = steps, kv_context
        self.extra = 0 if first_steps is None else first_steps - steps
        self.sigmas = [*sampling.schedule(steps, model.spec.shift), model.spec.context_sigma]
        self.first_sigmas = self.sigmas
        if first_steps is not None:
            self.first_sigmas = [*sampling.schedule(first_steps, model.spec.shift), model.spec.context_sigma]
        self.then = then
        self.then_sigmas = self.sigmas
        if then is not None:
            self.then_sigmas = [*sampling.schedule(then[1], model.spec.shift), model.spec.context_sigma]
        self.input: dict[Row, Tensor] = {}
        self.encode = cache(model.text.encode)

    @torch.inference_mode()
    def chunks(self, count: int) -> list[Tensor]:
        """Latents `[C, F, h, w]` of the first `count` chunks."""
        return [self._clean((chunk, self._steps(chunk))) for chunk in range(count)]

    def _steps(self, chunk: int) -> int:
        if self.then is not None and chunk >= self.then[0]:
            return self.then[1]
        return self.steps + self.extra * (chunk == 0)

    def _sigma(self, row: Row) -> float:
        if self.then is not None and row[0] >= self.then[0]:
            return self.then_sigmas[row[1]]
        return (self.sigmas if row[0] else self.first_sigmas)[row[1]]

    def _clean(self, row: Row) -> Tensor:
        """x0 as the step before `row` leaves it."""
        before = (row[0], row[1] - 1)
        return self._input(before) - self._sigma(before) * self._flow(before)

    def _input(self, row: Row) -> Tensor:
        """What goes into the transformer at `row`: x_t, for the clean pass at the context's level."""
        chunk, step = row
        if row not in self.input:
            shape = self.model.spec.chunk_shape
            fresh, sigma = sampling.noise(shape, seed=self.seed, chunk=chunk, step=step), self._sigma(row)
            self.input[row] = fresh if step == 0 else (1 - sigma) * self._clean(row) + sigma * fresh
        return self.input[row]

    def _flow(self, row: Row) -> Tensor:
        rows = sorted(self._closure(row), key=lambda r: (r[0], r[1]))
        spec, denoiser = self.model.spec, self.model.denoiser
        latents = torch.stack([self._input(r) for r in rows])
        timestep = torch.tensor([[1000 * self._sigma(r)] for r in rows]).expand(-1, spec.chunk_latents)
        layers = denoiser.text(torch.stack([self.encode(self.text(chunk)) for chunk, _ in rows]))
        text = [KeyValue(*layer) for layer in layers]
        seen = [[(rows.index(s), f) for s, f in self._sees(r)] for r in rows]
        grid = (spec.latent_height // denoiser.patch[1], spec.latent_width // denoiser.patch[2])
        tokens = denoiser.embed(latents, timestep)
        chunks = [chunk for chunk, _ in rows] if spec.rope == "absolute" else None
        attention = Explicit(seen, spec.chunk_latents, grid, chunks)
        tokens = denoiser.run_blocks(tokens, text, attention)
        return denoiser.output_layer(tokens, spec.chunk_shape[1:])[rows.index(row)]

    def _closure(self, row: Row) -> set[Row]:
        """`row` and every row its result depends on through attention."""
        found: set[Row] = set()
        waiting = [row]
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting += [seen for seen, _ in self._sees(current)]
        return found

    def _sees(self, row: Row) -> list[Sight]:
        seen = sees(self.model, row, self.steps, self.kv_context, self.extra, self.then)
        if self.model.spec.context_alone and row[1] == self.steps + self.extra * (row[0] == 0):
            return [each for each in map(self._of_the_sink, seen[:-1]) if each[1]] + [seen[-1]]
        return seen

    def _of_the_sink(self, sight: Sight) -> Sight:
        (chunk, step), frames = sight
        per = self.model.spec.chunk_latents
        return (chunk, step), [f for f in frames if chunk * per + f < self.model.spec.sink_latents]
