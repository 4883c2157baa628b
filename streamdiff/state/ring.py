"""Rolling key/value caches with a sink, and the attention that reads them.

Everything counts in chunks. Which slot a chunk writes and which slots it sees are plain integers computed from the
chunk's number, the same on every rank; a stream of a million chunks is as valid as the first ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.wan import rotary
from streamdiff.models.wan.transformer import attend


@dataclass(frozen=True)
class RingPlan:
    """Geometry of a ring: `sink` first chunks that stay, `window` chunks that a chunk sees (sink and itself included),
    `spare` slots beyond that for newer chunks that are in flight at the same time. Where positions are `absolute` the
    sink's keys keep theirs, otherwise the sink stands right before the window."""

    sink: int
    window: int
    spare: int = 0
    absolute: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.sink < self.window or self.spare < 0:
            raise ValueError(
                f"a ring of window {self.window} chunks with sink {self.sink} and {self.spare} spare slots cannot be: "
                "the sink must leave room for the chunk itself (0 <= sink < window), spare must not be negative"
            )

    @property
    def slots(self) -> int:
        return self.window + self.spare

    def slot(self, chunk: int) -> int:
        """Where chunk `chunk` (from 0) is kept."""
        if chunk < self.sink:
            return chunk
        return self.sink + (chunk - self.sink) % (self.slots - self.sink)

    def visible(self, chunk: int, since: int = 0) -> list[int]:
        """Chunks that `chunk` sees, oldest first, itself last; where positions are relative the n-th of them has
        position n. Chunks before `since` are forgotten, except for the sink."""
        first = max(self.sink, chunk + 1 - (self.window - self.sink), since)
        return [*range(min(self.sink, chunk)), *range(min(first, chunk), chunk + 1)]


@dataclass
class StageState:
    """One session's caches on one stage, allocated once and written in place.

    key and value are `[caches, layers, slots, tokens, H, d]`: one cache for the contexts `clean` and `staircase`, one
    per step for `matched`; `layers` are the stage's own blocks, `tokens` those of a chunk.
    """

    key: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        # Views are made once: there are two for every block, and every micro-step needs them.
        self._layers = [(keys.unbind(), values.unbind()) for keys, values in zip(self.key, self.value, strict=True)]

    @classmethod
    def allocate(
        cls, plan: RingPlan, *, caches: int, layers: int, tokens: int, heads: int, head_dim: int, like: Tensor
    ) -> StageState:
        shape = (caches, layers, plan.slots, tokens, heads, head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def layers(self, cache: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values `[slots, tokens, H, d]` of each layer in one of the caches."""
        return self._layers[cache]

    def reset(self) -> None:
        """Forget the stream. Mutates: self."""
        for field in fields(self):
            getattr(self, field.name).zero_()


@dataclass(frozen=True)
class RowShape:
    """What of a row's view holds for many chunks: a compiled graph is made for one, see `pipeline.compiled`.

    The row sees the first `sink` slots and `rest` others: those of `part` where they lie side by side, else those that
    an index tensor names. `in_sink`: it belongs to the sink itself. `adapt`: the similarity below which it takes a sink
    chunk's place.
    """

    in_sink: bool
    sink: int
    rest: int
    part: tuple[int, int] | None
    adapt: float | None = None


class RowTensors(NamedTuple):
    """What of a row's view is another for every chunk or session, all on the device.

    `keys` and `values`: each layer's slots `[slots, tokens, H, d]`. `at` `[1]` is the slot that the row writes, `rest`
    `[n]` those that it sees beyond the sink (None: the shape says so). `own` turns its queries and, unless it belongs
    to the sink, its keys; `sink_table` turns the sink's keys, which are kept un-rotated.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    at: Tensor
    rest: Tensor | None
    own: Tensor
    sink_table: Tensor | None


class RowView(NamedTuple):
    """What one row of a forward writes and sees."""

    shape: RowShape
    tensors: RowTensors


class RingAttention:
    """Self-attention of a forward over streams: each row writes its keys into its ring, then attends to its view.

    Only differences of rotary positions matter, so a key is rotated once, at its chunk's number in the stream, with
    angles computed in float64 (no table that ends). The sink alone moves, unless positions are absolute: it stands
    right before the window, and is re-placed at every read. Rows of different sessions never share keys; rows of one
    session are served in order, so a row sees what the rows before it have written.

    `compiled`: views for graphs that are made once for a `RowShape`, so there are few of these, and rotary factors are
    real numbers, which a compiler can fuse.
    """

    def __init__(
        self, frames: int, height: int, width: int, head_dim: int, device: torch.device, compiled: bool = False
    ) -> None:
        self.frames, self.device, self.compiled = frames, device, compiled
        self.rows: list[RowView] = []
        self._grid = rotary.Grid(height, width, head_dim, device)
        # All micro-steps of a chunk turn by the same angles; few chunks are in flight at once.
        self._table = lru_cache(maxsize=32)(self._make_table)
        # Slots come again and again: after a while nothing is uploaded any more.
        self._index = lru_cache(maxsize=256)(self._make_index)

    def view(
        self,
        plan: RingPlan,
        state: StageState,
        cache: int,
        chunk: int,
        since: int = 0,
        adapt: float | None = None,
    ) -> RowView:
        """The view of `chunk` in a ring where chunks before `since` are forgotten, except for the sink. With `adapt` it
        takes the place of the sink chunk that it is least like, if it is less like it than that."""
        visible = plan.visible(chunk, since)
        sink, in_sink = min(plan.sink, chunk + 1), chunk < plan.sink
        slots = tuple(sorted(plan.slot(c) for c in visible[sink:]))
        part = self._part(plan, slots)
        # Relative: the n-th visible chunk stands n places after the first, so count back from the chunk itself.
        sink_at = 0 if plan.absolute else chunk - (len(visible) - 1)
        shape = RowShape(in_sink, sink, len(slots), part, None if in_sink or not sink else adapt)
        keys, values = state.layers(cache)
        at, rest = self._index((plan.slot(chunk),)), self._index(slots) if part is None else None
        sink_table = self._table(sink_at, sink) if sink else None
        return RowView(shape, RowTensors(keys, values, at, rest, self._table(chunk, 1), sink_table))

    def on(self, rows: list[RowView]) -> RingAttention:
        """Point at the rows of the next forward. Mutates: self."""
        self.rows = rows
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `models.wan.transformer.SelfAttention`; `layer` counts the stage's blocks. Mutates: the rows' states."""
        return attend_rows(self.rows, layer, query, key, value)

    def _part(self, plan: RingPlan, slots: tuple[int, ...]) -> tuple[int, int] | None:
        """First slot and the one after the last, where `slots` lie side by side; compiled only where they are all."""
        first = slots[0] if slots else plan.sink
        whole = len(slots) in (0, plan.slots - plan.sink)
        adjacent = slots == tuple(range(first, first + len(slots)))
        return (first, first + len(slots)) if whole or (adjacent and not self.compiled) else None

    def _make_index(self, slots: tuple[int, ...]) -> Tensor:
        index = torch.tensor(slots)
        if self.device.type == "cuda":  # from pageable memory the host would wait for the copy
            index = index.pin_memory().to(self.device, non_blocking=True)
        return index

    def _make_table(self, chunk: int, count: int) -> Tensor:
        factors = self._grid.factors(range(chunk * self.frames, (chunk + count) * self.frames))
        return torch.view_as_real(factors).contiguous() if self.compiled else factors


def attend_rows(rows: Sequence[RowView], layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each row in turn writes its keys and values and attends to its view; all `[R, L, H, d]`. Mutates: the caches."""
    mixed = []
    for index, (shape, row) in enumerate(rows):
        keys, values = row.keys[layer], row.values[layer]
        keys.index_copy_(0, row.at, (key[index] if shape.in_sink else rotary.rotate(key[index], row.own))[None])
        values.index_copy_(0, row.at, value[index][None])
        seen_keys, seen_values = _rest(keys, shape, row), _rest(values, shape, row)
        if row.sink_table is not None:
            sink = rotary.rotate(keys[: shape.sink].flatten(0, 1), row.sink_table)
            seen_keys = torch.cat([sink, seen_keys])
            seen_values = torch.cat([values[: shape.sink].flatten(0, 1), seen_values])
        turned = rotary.rotate(query[index], row.own)
        mixed.append(attend(turned[None], seen_keys[None], seen_values[None]))
        if shape.adapt is not None:
            adapt_sink((keys[: shape.sink], values[: shape.sink]), (key[index], value[index]), shape.adapt)
    return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def _rest(slots: Tensor, shape: RowShape, row: RowTensors) -> Tensor:
    """What a row sees beyond the sink, `[tokens, H, d]` of all those slots."""
    if shape.part is not None:
        return slots[shape.part[0] : shape.part[1]].flatten(0, 1)
    assert row.rest is not None
    return slots.index_select(0, row.rest).flatten(0, 1)


def adapt_sink(sink: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], threshold: float) -> None:
    """Put a chunk's keys and values into the place of the sink chunk that they are least like, if they are less like it
    than `threshold` (-1 to 1; cosines of the means over tokens, of keys and of values, averaged). Nothing is read back
    to the host. After StreamDiffusionV2's published code (github.com/chenfengxu714/StreamDiffusionV2), a chunk at a
    time.

    Args:
        sink: keys, not rotated, and values `[sink chunks, tokens, H, d]`.
        own: the chunk's, `[tokens, H, d]`.

    Mutates: sink.
    """
    alike = sum(
        torch.cosine_similarity(kept.float().mean(1).flatten(1), new.float().mean(0).flatten()[None], dim=1)
        for kept, new in zip(sink, own, strict=True)
    )
    assert isinstance(alike, Tensor)
    place = torch.arange(len(alike), device=alike.device) == alike.argmin()
    replace = (place & (alike / 2 < threshold)).view(-1, 1, 1, 1)
    for kept, new in zip(sink, own, strict=True):
        kept.copy_(torch.where(replace, new, kept))
