"""Rolling key/value caches with a sink, and the attention that reads them.

A slot holds a chunk; windows and sinks are in latent frames, so the oldest chunk may be in sight with its last frames
only, and the sink may end within a chunk. Which slot a chunk writes and what it sees are plain integers computed from
its number, the same on every rank; a stream of a million chunks is as valid as the first ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.transformer import rope
from streamdiff.models.transformer.attention_backend import AttendParts, attention_over_segments
from streamdiff.pipeline.kv_cache.adaptive_ring import AdaptiveRing, AllHeads, likeness, take_slot
from streamdiff.pipeline.kv_cache.cache import KVCache, LayerCaches
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry


@dataclass(frozen=True)
class StaticMetadata:
    """The part of a row's attention metadata that holds for many chunks: a compiled graph is made for one, see
    `pipeline.runner.compiled_stage`. Counts and positions are in latent frames.

    chunk: frames in a slot.
    sink_frames: how many of the row's own frames, the first, belong to the sink.
    sink: frames of the sink that the row sees.
    window_frames: other cached frames that it sees, its own included.
    ranges: positions of all these in the cache, as contiguous (begin, end) ranges.
    moves_sink: whether the sink's keys are rotated within the forward, after this and earlier rows may have changed it.
    adapt: cosine below which the row is copied over the least similar sink chunk, after it has attended.
    ring: its adaptive ring, if the row is compared with the sink before it is written.
    fold: weight that the sink keeps when the evicted chunk is averaged into it.
    visible_later_rows: number of later rows of the forward that the row sees.
    keeps: number of the row's first frames that are not written.
    """

    chunk: int
    sink_frames: int
    sink: int
    window_frames: int
    ranges: tuple[tuple[int, int], ...]
    moves_sink: bool = False
    adapt: float | None = None
    ring: AdaptiveRing | None = None
    fold: float | None = None
    visible_later_rows: int = 0
    keeps: int = 0

    @property
    def plain(self) -> bool:
        """Whether the row writes its slot and nothing else, and sees no later row."""
        special = (self.moves_sink, self.adapt is not None, self.ring is not None, self.fold is not None)
        return not (any(special) or self.sink_frames or self.visible_later_rows or self.keeps)

    @property
    def keeps_unrotated(self) -> bool:
        """Whether keys of the row, not rotated, go into the sink."""
        return self.sink_frames > 0 or self.adapt is not None


class TensorMetadata(NamedTuple):
    """The part of a row's attention metadata that changes with chunk or session, all on the device.

    caches: of each layer.
    slot: the slot that the row writes `[1]`; that of a full adaptive ring is found on the device.
    query_rope: rotary factors of its queries and keys.
    sink_rope: those of the sink's keys; None unless it is moved within the forward.
    inverse_rope: those that undo the rotation of the evicted chunk's keys; None where nothing is folded.
    """

    caches: LayerCaches
    slot: Tensor
    query_rope: Tensor
    sink_rope: Tensor | None
    inverse_rope: Tensor | None


class AttentionMetadata(NamedTuple):
    """What one row of a forward writes and sees. `host_slot`: the value of `slot` on the host; None in graphs, which
    serve any slot, and where the device picks it."""

    shape: StaticMetadata
    tensors: TensorMetadata
    host_slot: int | None = None


class Projected(NamedTuple):
    """For each row, each `[L, H, d]`: rotated queries; rotated keys, or None if they are still to be rotated; values;
    and un-rotated keys, which are read only in that case, or if the row `keeps_unrotated`."""

    query: Sequence[Tensor]
    key: Sequence[Tensor | None]
    value: Sequence[Tensor]
    unrotated: Sequence[Tensor]


class RollingAttention:
    """Self-attention of a forward over streams: each row writes its keys into its ring, then attends to what it sees.

    Only differences of rotary positions matter, so a key is rotated once, at its place in the stream, with angles
    computed in float64 (no table that ends). The sink alone moves, unless positions are absolute: it stands right
    before the window. It lies rotated beside the window, and is rotated anew, from keys that are not, when it has moved
    or changed: once per chunk where one window uses the cache. So keys and values are attended to where they lie. Rows
    of different sessions never share keys; rows of one session are served in order, so a row sees what the rows before
    it have written.
    """

    def __init__(
        self,
        frames: int,
        height: int,
        width: int,
        head_dim: int,
        device: torch.device,
        attend: AttendParts | None = None,
        all_heads: AllHeads | None = None,
    ) -> None:
        """`frames` latent frames of a chunk, each of `height` x `width` tokens; `attend` is the kernel, torch's choice
        if it is None; `all_heads` as in `likeness`."""
        self.all_heads = all_heads
        self.frames, self.device, self.attend = frames, device, attend or attention_over_segments("auto")
        self.rows: list[AttentionMetadata] = []
        self.rotate_sinks: Callable[[Tensor, Tensor, Tensor], None] = rotate_sinks
        """What rotates the sinks of all layers, where that is done before the forward."""
        self._grid = rope.Grid(height, width, head_dim, device)
        # All micro-steps of a chunk turn by the same angles; few chunks are in flight at once.
        self._table = lru_cache(maxsize=32)(self._make_table)
        # The same slots are written again and again: after a while nothing is uploaded any more.
        self._index = lru_cache(maxsize=256)(partial(index_tensor, device=device))

    def row_metadata(
        self,
        geometry: CacheGeometry,
        state: KVCache,
        cache: int,
        chunk: int,
        visible_from_chunk: int = 0,
        adapt: float | None = None,
        fold: float | None = None,
        visible_later_rows: int = 0,
        before: Sequence[AttentionMetadata] = (),
        end_chunk: int | None = None,
        keep_sink: bool = False,
    ) -> AttentionMetadata:
        """Attention metadata of one row, that of `chunk`, which is run next. Mutates: the cache, where its sink moves.

        Args:
            visible_from_chunk: first visible chunk outside the sink.
            adapt: replace the least similar sink chunk where its cosine to this one is below this; None: do not look.
            fold: weight that the sink keeps when the evicted chunk is averaged into it.
            visible_later_rows: number of later rows of this forward that the row sees.
            before: the rows before it in this forward.
            end_chunk: the newest chunk that is visible; None: that of the last visible row.
            keep_sink: frames of the sink are not written.
        """
        if geometry.adaptive:
            return self._adaptive(geometry, state, cache, chunk, visible_from_chunk, adapt, visible_later_rows)
        end_chunk = chunk + visible_later_rows if end_chunk is None else end_chunk
        sink, first = geometry.frames(end_chunk, visible_from_chunk)
        begin, end, gone = chunk * geometry.chunk, (end_chunk + 1) * geometry.chunk, geometry.evicted(chunk)
        sink_frames = min(max(geometry.sink - begin, 0), geometry.chunk)
        sink_frames, keeps = (0, sink_frames) if keep_sink else (sink_frames, 0)
        adapt = adapt if geometry.sink and not sink_frames else None
        fold = fold if gone >= max(geometry.pinned, visible_from_chunk) else None
        caches = state.layers(cache)
        # Relative: the sink's last frame is followed by the window's first, so count back from there.
        sink_at = 0 if geometry.absolute else first - sink
        moved = sink > 0 and state.move_sink(cache, sink_at)
        changed = fold is not None or (sink_frames > 0 and sink_at > 0)  # by the row itself
        sink_rope = self._table(sink_at, sink) if moved or changed else None
        if sink_rope is not None and not changed and not any(row.tensors.caches is caches for row in before):
            tokens = len(sink_rope[0])
            kept, rotated = (each[cache].flatten(1, 2)[:, :tokens] for each in (state.sink_key, state.key))
            self.rotate_sinks(kept, rotated, sink_rope)
            sink_rope = None
        if adapt is not None:
            state.move_sink(cache, None)
        ranges = _ranges([*range(sink), *map(geometry.position, range(first, end))])
        moves = sink_rope is not None
        shape = StaticMetadata(
            geometry.chunk, sink_frames, sink, end - first, ranges, moves, adapt, fold=fold,
            visible_later_rows=visible_later_rows, keeps=keeps,
        )  # fmt: skip
        inverse_rope = self._table(gone * geometry.chunk, geometry.chunk, True) if fold is not None else None
        host_slot = geometry.slot(chunk)
        slot, query_rope = self._index((host_slot,)), self._table(begin, geometry.chunk)
        return AttentionMetadata(shape, TensorMetadata(caches, slot, query_rope, sink_rope, inverse_rope), host_slot)

    def _adaptive(
        self,
        geometry: CacheGeometry,
        state: KVCache,
        cache: int,
        chunk: int,
        visible_from_chunk: int,
        threshold: float | None,
        visible_later_rows: int,
    ) -> AttentionMetadata:
        """`row_metadata` of an adaptive ring: it is filled slot by slot, anew after a flush; then a row sees all of it.
        Keys stay as they were rotated, also those in the sink. Mutates: the cache, where a ring begins."""
        rolling, begins = geometry.slots - geometry.pinned, max(geometry.pinned, visible_from_chunk)
        if chunk == begins > geometry.pinned:
            state.begin_ring(cache)
        full = chunk - begins >= rolling
        slot = chunk if chunk < geometry.pinned else geometry.pinned + min(chunk - begins, rolling - 1)
        seen = min(slot + 1 + visible_later_rows, geometry.slots) * geometry.chunk
        sink = min(geometry.sink, seen)
        ring = None if threshold is None else AdaptiveRing(threshold, geometry.pinned, rolling, full)
        shape = StaticMetadata(
            geometry.chunk, 0, sink, seen - sink, ((0, seen),), ring=ring, visible_later_rows=visible_later_rows
        )
        query_rope = self._table(chunk * geometry.chunk, geometry.chunk)
        return AttentionMetadata(
            shape, TensorMetadata(state.layers(cache), self._index((slot,)), query_rope, None, None)
        )

    def on(self, rows: list[AttentionMetadata]) -> RollingAttention:
        """Point at the rows of the next forward. Mutates: self."""
        self.rows = rows
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `models.transformer.wan.SelfAttention`; `layer` counts the stage's blocks. Mutates: the rows' states."""
        projected = rotated_rows(self.rows, query, key, value)
        return attend_rows(self.rows, layer, projected, self.attend, self.all_heads)

    def _make_table(self, first: int, count: int, inverse: bool = False) -> Tensor:
        factors = self._grid.factors(range(first, first + count))
        return rope.matrices(factors.conj() if inverse else factors)


def index_tensor(indices: Sequence[int], device: torch.device) -> Tensor:
    """Indices as an int64 tensor on `device`, without synchronizing with it."""
    index = torch.tensor(indices)
    if device.type == "cuda":  # from pageable memory the host would wait for the copy
        index = index.pin_memory().to(device, non_blocking=True)
    return index


def rotated_rows(rows: Sequence[AttentionMetadata], query: Tensor, key: Tensor, value: Tensor) -> Projected:
    """Of queries, keys and values `[R, L, H, d]` what rows attend with. Keys are rotated where they are written."""
    queries = [rope.rotate(own, row.tensors.query_rope) for own, row in zip(query, rows, strict=True)]
    return Projected(queries, [None] * len(rows), value.unbind(), key.unbind())


def attend_rows(
    rows: Sequence[AttentionMetadata],
    layer: int,
    projected: Projected,
    attend: AttendParts,
    all_heads: AllHeads | None = None,
) -> Tensor:
    """Each row in turn writes its keys and values, then attends by the kernel `attend`; later rows that it sees are
    written before. Returns the attention output `[R, L, H, d]`. Mutates: the caches."""
    mixed, written = [], 0
    for index, (shape, row, _) in enumerate(rows):
        while written <= index + shape.visible_later_rows:
            value, unrotated = projected.value[written], projected.unrotated[written]
            _write(rows[written], layer, projected.key[written], value, unrotated, all_heads)
            written += 1
        caches = row.caches
        if row.sink_rope is not None:
            tokens = len(row.sink_rope[0])
            kept, rotated = (each[layer].flatten(0, 1)[None, :tokens] for each in (caches.sink_keys, caches.keys))
            rotate_sinks(kept, rotated, row.sink_rope)
        keys, values = (_frames(each[layer], shape.chunk) for each in caches[:2])
        seen = [(keys[a:b].flatten(0, 1)[None], values[a:b].flatten(0, 1)[None]) for a, b in shape.ranges]
        mixed.append(attend(projected.query[index][None], seen))
        if shape.adapt is not None:
            sink, own = caches.sink_keys[layer], (projected.unrotated[index], projected.value[index])
            adapt_sink((sink, caches.values[layer][: len(sink)]), own, shape.adapt, all_heads)
    return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def _write(
    metadata: AttentionMetadata,
    layer: int,
    rotated: Tensor | None,
    value: Tensor,
    unrotated: Tensor,
    all_heads: AllHeads | None,
) -> None:
    """Put a row's keys and values `[L, H, d]` into its slot; keys that are not rotated yet are rotated into it, where
    the host knows it and all of it is written. Mutates: the caches."""
    shape, row, host_slot = metadata
    keys, values, sink_keys, queue = (each[layer] for each in row.caches)
    if shape.fold is not None and row.inverse_rope is not None:
        gone = rope.rotate(keys.index_select(0, row.slot)[0], row.inverse_rope), values.index_select(0, row.slot)[0]
        fold_into_sink((sink_keys[0], values[0]), gone, shape.fold)
    slot = row.slot
    there = keys[host_slot] if rotated is None and host_slot is not None and not shape.keeps else None
    if rotated is None:
        rotated = rope.rotate(unrotated, row.query_rope, there)
    if (ring := shape.ring) is not None:
        slot = take_slot(ring, queue, (keys[: ring.sink], values[: ring.sink]), (rotated, value), row.slot, all_heads)
    if shape.keeps:
        kept = shape.keeps * len(rotated) // shape.chunk
        rotated, value = (
            torch.cat([own.index_select(0, slot)[0, :kept], new[kept:]])
            for own, new in ((keys, rotated), (values, value))
        )
    if there is None:
        keys.index_copy_(0, slot, rotated[None])
    values.index_copy_(0, slot, value[None])
    if shape.sink_frames:
        sink_keys.index_copy_(0, row.slot, unrotated[None])


def rotate_sinks(kept: Tensor, rotated: Tensor, factors: Tensor) -> None:
    """Rotate the sink's keys of some layers to where `factors` say, next to the window: `kept`, not rotated, into
    `rotated`, both `[layers, tokens, H, d]`. One layer after the other, as a copy of all takes much memory. Mutates:
    rotated."""
    for own, there in zip(kept, rotated, strict=True):
        there.copy_(rope.rotate(own, factors))


def _ranges(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Positions, each once, as ranges without gaps, in order."""
    there = set(positions)
    begins = sorted(position for position in there if position - 1 not in there)
    ends = sorted(position + 1 for position in there if position + 1 not in there)
    return tuple(zip(begins, ends, strict=True))


def _frames(slots: Tensor, chunk: int) -> Tensor:
    """Slots `[slots, tokens, H, d]` of `chunk` latent frames each as these `[slots * chunk, tokens of one, H, d]`."""
    frames: Tensor = slots.unflatten(1, (chunk, -1))
    return frames.flatten(0, 1)


def adapt_sink(
    sink: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], threshold: float, all_heads: AllHeads | None = None
) -> None:
    """Put a chunk's keys and values into the place of the sink chunk that they are least like, if they are less like it
    than `threshold` (-1 to 1; cosines of the means over tokens, of keys and of values, averaged). Nothing is read back
    to the host. After StreamDiffusionV2's published code (github.com/chenfengxu714/StreamDiffusionV2), a chunk at a
    time.

    Args:
        sink: keys, not rotated, and values `[sink chunks, tokens, H, d]`.
        own: the chunk's, `[tokens, H, d]`.
        all_heads: as in `likeness`.

    Mutates: sink.
    """
    alike = likeness(sink, own, all_heads)
    place = torch.arange(len(alike), device=alike.device) == alike.argmin()
    replace = (place & (alike < threshold)).view(-1, 1, 1, 1)
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
