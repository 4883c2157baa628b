"""Rolling key/value caches with a sink, and the attention that reads them.

Everything counts in chunks. Which slot a chunk writes and which slots it sees are plain integers computed from the
chunk's number, the same on every rank; a stream of a million chunks is as valid as the first ten.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

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

    @classmethod
    def allocate(
        cls, plan: RingPlan, *, caches: int, layers: int, tokens: int, heads: int, head_dim: int, like: Tensor
    ) -> StageState:
        shape = (caches, layers, plan.slots, tokens, heads, head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def reset(self) -> None:
        """Forget the stream. Mutates: self."""
        for field in fields(self):
            getattr(self, field.name).zero_()


@dataclass(frozen=True)
class RowView:
    """What one row of a forward writes and sees.

    `slot` is where it writes. It sees the first `sink` slots and those of `rest` (a slice where they lie side by side,
    else an index tensor). `own` turns its queries and, unless it belongs to the sink, its keys; `sink_table` turns the
    sink's keys, which are kept un-rotated. `adapt`: the similarity below which the row takes a sink chunk's place.
    """

    state: StageState
    cache: int
    slot: int
    in_sink: bool
    sink: int
    rest: slice | Tensor
    own: Tensor
    sink_table: Tensor | None
    adapt: float | None = None


class RingAttention:
    """Self-attention of a forward over streams: each row writes its keys into its ring, then attends to its view.

    Only differences of rotary positions matter, so a key is rotated once, at its chunk's number in the stream, with
    angles computed in float64 (no table that ends). The sink alone moves, unless positions are absolute: it stands
    right before the window, and is re-placed at every read. Rows of different sessions never share keys.
    """

    def __init__(self, frames: int, height: int, width: int, head_dim: int, device: torch.device) -> None:
        self.frames, self.grid, self.head_dim, self.device = frames, (height, width), head_dim, device
        self.rows: list[RowView] = []
        # All micro-steps of a chunk turn by the same angles; few chunks are in flight at once.
        self._table = lru_cache(maxsize=32)(self._make_table)

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
        sink = min(plan.sink, chunk + 1)
        slots = sorted(plan.slot(c) for c in visible[sink:])
        first = slots[0] if slots else 0
        adjacent = slots == list(range(first, first + len(slots)))
        rest = slice(first, first + len(slots)) if adjacent else torch.tensor(slots, device=self.device)
        # Relative: the n-th visible chunk stands n places after the first, so count back from the chunk itself.
        sink_at = 0 if plan.absolute else chunk - (len(visible) - 1)
        sink_table = self._table(sink_at, sink) if sink else None
        in_sink = chunk < plan.sink
        adapt = None if in_sink or not sink else adapt
        return RowView(state, cache, plan.slot(chunk), in_sink, sink, rest, self._table(chunk, 1), sink_table, adapt)

    def on(self, rows: list[RowView]) -> RingAttention:
        """Point at the rows of the next forward. Mutates: self."""
        self.rows = rows
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `models.wan.transformer.SelfAttention`; `layer` counts the stage's blocks. Mutates: the rows' states."""
        mixed = []
        for index, row in enumerate(self.rows):
            keys, values = row.state.key[row.cache, layer], row.state.value[row.cache, layer]
            keys[row.slot].copy_(key[index] if row.in_sink else rotary.rotate(key[index], row.own))
            values[row.slot].copy_(value[index])
            seen_keys, seen_values = keys[row.rest].flatten(0, 1), values[row.rest].flatten(0, 1)
            if row.sink_table is not None:
                sink = rotary.rotate(keys[: row.sink].flatten(0, 1), row.sink_table)
                seen_keys = torch.cat([sink, seen_keys])
                seen_values = torch.cat([values[: row.sink].flatten(0, 1), seen_values])
            turned = rotary.rotate(query[index], row.own)
            mixed.append(attend(turned[None], seen_keys[None], seen_values[None]))
            if row.adapt is not None:
                adapt_sink((keys[: row.sink], values[: row.sink]), (key[index], value[index]), row.adapt)
        return torch.cat(mixed)

    def _make_table(self, chunk: int, count: int) -> Tensor:
        positions = torch.arange(chunk * self.frames, (chunk + count) * self.frames, device=self.device)
        return rotary.table(positions, *self.grid, self.head_dim)


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
