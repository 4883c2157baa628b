"""Rolling key/value caches with a sink, and the attention that reads them.

A slot holds a chunk; windows and sinks are in latent frames, so the oldest chunk may be in sight with its last frames
only, and the sink may end within a chunk. Which slot a chunk writes and what it sees are plain integers computed from
its number, the same on every rank; a stream of a million chunks is as valid as the first ten.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from streamdiff.models.wan import rotary
from streamdiff.models.wan.transformer import attend


@dataclass(frozen=True)
class RingPlan:
    """Geometry of a ring, in latent frames: `sink` first frames that stay, `window` frames that a chunk of `chunk`
    frames sees (sink and itself included); `spare` slots, in chunks, beyond that for newer chunks that are in flight at
    the same time. Where positions are `absolute` the sink's keys keep theirs, otherwise the sink stands right before
    the window."""

    sink: int
    window: int
    spare: int = 0
    absolute: bool = False
    chunk: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.sink <= self.window - self.chunk or self.chunk < 1 or self.spare < 0:
            raise ValueError(
                f"a ring of window {self.window}, sink {self.sink} and chunks of {self.chunk} latent frames with "
                f"{self.spare} spare slots cannot be: the window holds at least the sink and one chunk, nothing is "
                "negative"
            )

    @property
    def pinned(self) -> int:
        """Slots that are not written again, since the sink, or the end of it, is in them."""
        return -(-self.sink // self.chunk)

    @property
    def slots(self) -> int:
        return self.pinned - (self.sink - self.window) // self.chunk + self.spare

    def slot(self, chunk: int) -> int:
        """Where chunk `chunk` (from 0) is kept."""
        if chunk < self.pinned:
            return chunk
        return self.pinned + (chunk - self.pinned) % (self.slots - self.pinned)

    def frames(self, chunk: int, since: int = 0) -> tuple[int, int]:
        """What `chunk` sees of the stream's latent frames: how many of the first, as the sink, and the first of those
        in the window, which go on to its own last. Chunks before `since` are forgotten, except for the sink."""
        end = (chunk + 1) * self.chunk
        sink = min(self.sink, end)
        return sink, max(sink, end - (self.window - self.sink), min(since, chunk) * self.chunk)

    def evicted(self, chunk: int) -> int:
        """The chunk whose slot `chunk` takes; below `pinned` if there is none."""
        return chunk - (self.slots - self.pinned) if chunk >= self.pinned else -1

    def visible(self, chunk: int, since: int = 0) -> list[int]:
        """Chunks of which `chunk` sees a frame or more, oldest first, itself last."""
        sink, first = self.frames(chunk, since)
        return sorted({*range(-(-sink // self.chunk)), *range(first // self.chunk, chunk), chunk})


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
    """What one row of a forward writes and sees; counts and places are of tokens, slot after slot.

    `slot` is where it writes. It sees the first `sink` tokens and those of `rest` (a slice where they lie side by side,
    else an index tensor). `own` turns its queries and, after the first `raw`, which belong to the sink, its keys;
    `sink_table` turns the sink's keys, which are kept un-rotated. `adapt`: the similarity below which the row takes a
    sink chunk's place. `fold`: the share of the sink that stays when the chunk whose slot the row takes is folded into
    it, and what turns that chunk's keys back.
    """

    state: StageState
    cache: int
    slot: int
    raw: int
    sink: int
    rest: slice | Tensor
    own: Tensor
    sink_table: Tensor | None
    adapt: float | None = None
    fold: tuple[float, Tensor] | None = None


class RingAttention:
    """Self-attention of a forward over streams: each row writes its keys into its ring, then attends to its view.

    Only differences of rotary positions matter, so a key is rotated once, at its place in the stream, with angles
    computed in float64 (no table that ends). The sink alone moves, unless positions are absolute: it stands right
    before the window, and is re-placed at every read. Rows of different sessions never share keys.
    """

    def __init__(self, frames: int, height: int, width: int, head_dim: int, device: torch.device) -> None:
        """`frames` latent frames of a chunk, each of `height` x `width` tokens."""
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
        fold: float | None = None,
    ) -> RowView:
        """The view of `chunk` in a ring where chunks before `since` are forgotten, except for the sink. With `adapt` it
        takes the place of the sink chunk that it is least like, if it is less like it than that. With `fold` the chunk
        whose slot it takes is folded into the sink first, of which that share stays."""
        tokens = self.grid[0] * self.grid[1]  # of a latent frame
        sink, first = plan.frames(chunk, since)
        begin, end = chunk * plan.chunk, (chunk + 1) * plan.chunk
        # Relative: the sink's last frame is followed by the window's first, so count back from there.
        sink_table = self._table(0 if plan.absolute else first - sink, sink) if sink else None
        raw = min(max(plan.sink - begin, 0), plan.chunk)
        rest = self._places(plan, first, end)
        adapt = adapt if plan.sink and not raw else None
        own, gone = self._table(begin, plan.chunk), plan.evicted(chunk)
        leaves = fold is not None and gone >= max(plan.pinned, since)
        folding = (fold, self._table(gone * plan.chunk, plan.chunk).conj()) if fold is not None and leaves else None
        slot, raw, sink = plan.slot(chunk), raw * tokens, sink * tokens
        return RowView(state, cache, slot, raw, sink, rest, own, sink_table, adapt, folding)

    def on(self, rows: list[RowView]) -> RingAttention:
        """Point at the rows of the next forward. Mutates: self."""
        self.rows = rows
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `models.wan.transformer.SelfAttention`; `layer` counts the stage's blocks. Mutates: the rows' states."""
        mixed = []
        for index, row in enumerate(self.rows):
            keys, values = row.state.key[row.cache, layer], row.state.value[row.cache, layer]
            if row.fold is not None:
                gone = rotary.rotate(keys[row.slot], row.fold[1]), values[row.slot]
                fold_into_sink((keys[0], values[0]), gone, row.fold[0])
            keys[row.slot].copy_(rotary.rotate(key[index], row.own))
            if row.raw:
                keys[row.slot, : row.raw].copy_(key[index, : row.raw])
            values[row.slot].copy_(value[index])
            all_keys, all_values = keys.flatten(0, 1), values.flatten(0, 1)
            seen_keys, seen_values = all_keys[row.rest], all_values[row.rest]
            if row.sink_table is not None:
                sink = rotary.rotate(all_keys[: row.sink], row.sink_table)
                seen_keys = torch.cat([sink, seen_keys])
                seen_values = torch.cat([all_values[: row.sink], seen_values])
            turned = rotary.rotate(query[index], row.own)
            mixed.append(attend(turned[None], seen_keys[None], seen_values[None]))
            if row.adapt is not None:
                count = row.sink // key.shape[1]
                adapt_sink((keys[:count], values[:count]), (key[index], value[index]), row.adapt)
        return torch.cat(mixed)

    def _places(self, plan: RingPlan, first: int, end: int) -> slice | Tensor:
        """Where the tokens of the stream's latent frames `first` to `end` (exclusive) lie, in order of their places."""
        tokens, runs = self.grid[0] * self.grid[1], []
        for chunk in range(first // plan.chunk, -(-end // plan.chunk)):
            slot, begin = plan.slot(chunk) * plan.chunk, chunk * plan.chunk
            runs.append((slot + max(first - begin, 0), slot + min(end - begin, plan.chunk)))
        runs.sort()
        if all(before[1] == after[0] for before, after in pairwise(runs)):
            return slice(runs[0][0] * tokens, runs[-1][1] * tokens) if runs else slice(0, 0)
        places = [torch.arange(low * tokens, high * tokens, device=self.device) for low, high in runs]
        return torch.cat(places)

    def _make_table(self, first: int, count: int) -> Tensor:
        positions = torch.arange(first, first + count, device=self.device)
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


def fold_into_sink(sink: tuple[Tensor, Tensor], gone: tuple[Tensor, Tensor], keep: float) -> None:
    """Fold what leaves the ring into the sink, token by token: keep * sink + (1 - keep) * gone. After Reward-Forcing
    (arXiv 2512.04678, github.com/JaydenLyh/Reward-Forcing), whose sink, like here, is one chunk. The sum is made in
    float32 and rounded to the cache's dtype, as theirs is: in bfloat16 small changes are lost in that.

    Args:
        sink, gone: keys, not rotated, and values of a chunk `[tokens, H, d]`.

    Mutates: sink.
    """
    for kept, leaving in zip(sink, gone, strict=True):
        kept.copy_(keep * kept.float() + (1 - keep) * leaving.float())
