"""Rolling key/value caches with a sink, and the attention that reads them.

A slot holds a chunk; windows and sinks are in latent frames, so the oldest chunk may be in sight with its last frames
only, and the sink may end within a chunk. Which slot a chunk writes and what it sees are plain integers computed from
its number, the same on every rank; a stream of a million chunks is as valid as the first ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.transformer import rope
from streamdiff.models.transformer.attention_backend import Attend, attend
from streamdiff.pipeline.kv_cache.cache import KVCache
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry


@dataclass(frozen=True)
class StaticMetadata:
    """What of a row's view holds for many chunks: a compiled graph is made for one, see
    `pipeline.runner.compiled_stage`.

    Counts and places are of latent frames, `chunk` in a slot. The row sees the first `sink` frames of the ring and
    `rest` others: those of `part` where they lie side by side, else those that an index tensor names. `raw`: how many
    of its own frames, the first, belong to the sink. `adapt`: the similarity below which it takes a sink chunk's place.
    `fold`: the share of the sink that stays when the chunk whose slot it takes is folded into it first. `ahead`: how
    many rows after it in the forward it sees, since they are made together.
    """

    chunk: int
    raw: int
    sink: int
    rest: int
    part: tuple[int, int] | None
    adapt: float | None = None
    fold: float | None = None
    ahead: int = 0


class TensorMetadata(NamedTuple):
    """What of a row's view is another for every chunk or session, all on the device.

    `keys` and `values`: each layer's slots `[slots, tokens, H, d]`. `at` `[1]` is the slot that the row writes, `rest`
    `[n]` the latent frames that it sees beyond the sink (None: the shape says so). `own` turns its queries and, but for
    those of the sink, its keys; `sink_table` turns the sink's keys, which are kept un-rotated; `back` turns the keys of
    the chunk whose slot it takes as if they had not been rotated.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    at: Tensor
    rest: Tensor | None
    own: Tensor
    sink_table: Tensor | None
    back: Tensor | None


class AttentionMetadata(NamedTuple):
    """What one row of a forward writes and sees."""

    shape: StaticMetadata
    tensors: TensorMetadata


class RollingAttention:
    """Self-attention of a forward over streams: each row writes its keys into its ring, then attends to its view.

    Only differences of rotary positions matter, so a key is rotated once, at its place in the stream, with angles
    computed in float64 (no table that ends). The sink alone moves, unless positions are absolute: it stands right
    before the window, and is re-placed at every read. Rows of different sessions never share keys; rows of one session
    are served in order, so a row sees what the rows before it have written.

    `compiled`: views for graphs that are made once for a `StaticMetadata`, so there are few of these. `attend`: the
    kernel.
    """

    def __init__(
        self,
        frames: int,
        height: int,
        width: int,
        head_dim: int,
        device: torch.device,
        compiled: bool = False,
        attend: Attend = attend,
    ) -> None:
        """`frames` latent frames of a chunk, each of `height` x `width` tokens."""
        self.frames, self.device, self.compiled, self.attend = frames, device, compiled, attend
        self.rows: list[AttentionMetadata] = []
        self._grid = rope.Grid(height, width, head_dim, device)
        # All micro-steps of a chunk turn by the same angles; few chunks are in flight at once.
        self._table = lru_cache(maxsize=32)(self._make_table)
        # Places come again and again: after a while nothing is uploaded any more.
        self._index = lru_cache(maxsize=256)(self._make_index)

    def view(
        self,
        plan: CacheGeometry,
        state: KVCache,
        cache: int,
        chunk: int,
        since: int = 0,
        adapt: float | None = None,
        fold: float | None = None,
        ahead: int = 0,
    ) -> AttentionMetadata:
        """The view of `chunk` in a ring where chunks before `since` are forgotten, except for the sink. With `adapt` it
        takes the place of the sink chunk that it is least like, if it is less like it than that. With `fold` the chunk
        whose slot it takes is folded into the sink first, of which that share stays. It sees what the chunk `ahead` of
        it sees, of whose row and those between it is to be told in the same forward, after its own."""
        sink, first = plan.frames(chunk + ahead, since)
        begin, end, gone = chunk * plan.chunk, (chunk + ahead + 1) * plan.chunk, plan.evicted(chunk)
        places = tuple(sorted(plan.place(frame) for frame in range(first, end)))
        part, raw = self._part(plan, places), min(max(plan.sink - begin, 0), plan.chunk)
        adapt = adapt if plan.sink and not raw else None
        fold = fold if gone >= max(plan.pinned, since) else None
        shape = StaticMetadata(plan.chunk, raw, sink, len(places), part, adapt, fold, ahead)
        keys, values = state.layers(cache)
        at, rest = self._index((plan.slot(chunk),)), self._index(places) if part is None else None
        # Relative: the sink's last frame is followed by the window's first, so count back from there.
        sink_table = self._table(0 if plan.absolute else first - sink, sink) if sink else None
        back = self._table(gone * plan.chunk, plan.chunk, True) if fold is not None else None
        own = self._table(begin, plan.chunk)
        return AttentionMetadata(shape, TensorMetadata(keys, values, at, rest, own, sink_table, back))

    def on(self, rows: list[AttentionMetadata]) -> RollingAttention:
        """Point at the rows of the next forward. Mutates: self."""
        self.rows = rows
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `models.transformer.wan.SelfAttention`; `layer` counts the stage's blocks. Mutates: the rows' states."""
        return attend_rows(self.rows, layer, query, key, value, self.attend)

    def _part(self, plan: CacheGeometry, places: tuple[int, ...]) -> tuple[int, int] | None:
        """First place and the one after the last, where `places` are side by side; compiled only where they are all."""
        first = places[0] if places else plan.sink
        whole = len(places) in (0, (plan.slots - plan.pinned) * plan.chunk)
        adjacent = places == tuple(range(first, first + len(places)))
        return (first, first + len(places)) if adjacent and (whole or not self.compiled) else None

    def _make_index(self, places: tuple[int, ...]) -> Tensor:
        index = torch.tensor(places)
        if self.device.type == "cuda":  # from pageable memory the host would wait for the copy
            index = index.pin_memory().to(self.device, non_blocking=True)
        return index

    def _make_table(self, first: int, count: int, back: bool = False) -> Tensor:
        factors = self._grid.factors(range(first, first + count))
        return torch.view_as_real(factors.conj().resolve_conj() if back else factors).contiguous()


def attend_rows(
    rows: Sequence[AttentionMetadata], layer: int, query: Tensor, key: Tensor, value: Tensor, attend: Attend = attend
) -> Tensor:
    """Each row in turn writes its keys and values and attends to its view, by the kernel `attend`; those that it sees
    of the rows after it are written before. All `[R, L, H, d]`. Mutates: the caches."""
    mixed, written = [], 0
    for index, (shape, row) in enumerate(rows):
        while written <= index + shape.ahead:
            _write(rows[written], layer, key[written], value[written])
            written += 1
        keys, values = row.keys[layer], row.values[layer]
        seen_keys, seen_values = _rest(keys, shape, row), _rest(values, shape, row)
        if row.sink_table is not None:
            sink = rope.rotate(_frames(keys, shape)[: shape.sink].flatten(0, 1), row.sink_table)
            seen_keys = torch.cat([sink, seen_keys])
            seen_values = torch.cat([_frames(values, shape)[: shape.sink].flatten(0, 1), seen_values])
        turned = rope.rotate(query[index], row.own)
        mixed.append(attend(turned[None], seen_keys[None], seen_values[None]))
        if shape.adapt is not None:
            count = shape.sink // shape.chunk
            adapt_sink((keys[:count], values[:count]), (key[index], value[index]), shape.adapt)
    return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def _write(view: AttentionMetadata, layer: int, key: Tensor, value: Tensor) -> None:
    """Put a row's keys and values `[L, H, d]` into its slot. Mutates: the caches."""
    shape, row = view
    keys, values = row.keys[layer], row.values[layer]
    if shape.fold is not None and row.back is not None:
        gone = rope.rotate(keys.index_select(0, row.at)[0], row.back), values.index_select(0, row.at)[0]
        fold_into_sink((keys[0], values[0]), gone, shape.fold)
    keys.index_copy_(0, row.at, _own_keys(shape, row, key)[None])
    values.index_copy_(0, row.at, value[None])


def _own_keys(shape: StaticMetadata, row: TensorMetadata, key: Tensor) -> Tensor:
    """A row's keys `[tokens, H, d]` as they are kept: rotated, but for those of the sink."""
    if shape.raw == shape.chunk:
        return key
    turned = rope.rotate(key, row.own)
    raw = shape.raw * len(key) // shape.chunk
    return torch.cat([key[:raw], turned[raw:]]) if raw else turned


def _frames(slots: Tensor, shape: StaticMetadata) -> Tensor:
    """Slots `[slots, tokens, H, d]` as latent frames `[slots * chunk, tokens of one, H, d]`."""
    frames: Tensor = slots.unflatten(1, (shape.chunk, -1))
    return frames.flatten(0, 1)


def _rest(slots: Tensor, shape: StaticMetadata, row: TensorMetadata) -> Tensor:
    """What a row sees beyond the sink, `[tokens, H, d]` of all those frames."""
    frames = _frames(slots, shape)
    if shape.part is not None:
        return frames[shape.part[0] : shape.part[1]].flatten(0, 1)
    assert row.rest is not None
    return frames.index_select(0, row.rest).flatten(0, 1)


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
