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

from streamdiff.device import upload
from streamdiff.models.transformer import attention_backend, rope
from streamdiff.models.transformer.attention_backend import AttendPaged, AttendParts
from streamdiff.models.transformer.wan import SelfAttention
from streamdiff.pipeline.kv_cache.cache import KVCache, LayerCaches
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry

AllHeads = Callable[[Tensor], Tensor]


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


class RollingAttention:
    """Self-attention of a forward over streams: each row writes its keys into its ring, then attends to what it sees.

    Only differences of rotary positions matter, so a key is rotated once, at its place in the stream, with angles
    computed in float64 (no table that ends). The sink alone moves, unless positions are absolute: it stands right
    before the window. It lies rotated beside the window, and is rotated again, from unrotated keys, when it has moved
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
        self.frames, self.device = frames, device
        self.attend = attend or attention_backend.attention_over_segments("auto")
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
        sink_at = geometry.sink_at(end_chunk, visible_from_chunk)
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
        """`row_metadata` of an adaptive ring: filled slot by slot, again after a flush; then a row sees all of it.
        Keys stay as they were rotated, also those in the sink. Mutates: the cache, where a ring begins."""
        rolling, begins = geometry.slots - geometry.pinned, max(geometry.pinned, visible_from_chunk)
        if chunk == begins > geometry.pinned:
            state.queue[cache].zero_()  # the ring behind the sink is filled again
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

    def on(self, rows: Sequence[AttentionMetadata]) -> SelfAttention:
        """What the next forward, of these rows, attends with; it mutates their caches."""
        return partial(attend_rows, rows, self.attend, self.all_heads)

    def _make_table(self, first: int, count: int, inverse: bool = False) -> Tensor:
        factors = self._grid.factors(range(first, first + count))
        return rope.matrices(factors.conj() if inverse else factors)


def index_tensor(indices: Sequence[int], device: torch.device) -> Tensor:
    """Indices as an int64 tensor on `device`, without synchronizing with it."""
    return upload(torch.tensor(indices), device)


def attend_rows(
    rows: Sequence[AttentionMetadata],
    attend: AttendParts,
    all_heads: AllHeads | None,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotated: Tensor | None = None,
) -> Tensor:
    """Each row in turn writes its keys and values, then attends by the kernel `attend`; later rows that it sees are
    written before. See `models.transformer.wan.SelfAttention`; `layer` counts the stage's blocks.

    Args:
        all_heads: as in `likeness`.
        rotated: keys that are rotated already, and then so are queries; None: both are rotated here, keys where they
            are written. Of `key` only rows that `keeps_unrotated` are read in that case.

    Mutates: the caches.
    """
    mixed, written = [], 0
    for index, (shape, row, _) in enumerate(rows):
        while written <= index + shape.visible_later_rows:
            own = None if rotated is None else rotated[written]
            _write(rows[written], layer, own, value[written], key[written], all_heads)
            written += 1
        caches = row.caches
        if row.sink_rope is not None:
            tokens = len(row.sink_rope[0])
            kept, turned = (each[layer].flatten(0, 1)[None, :tokens] for each in (caches.sink_keys, caches.keys))
            rotate_sinks(kept, turned, row.sink_rope)
        keys, values = (_frames(each[layer], shape.chunk) for each in caches[:2])
        seen = [(keys[a:b].flatten(0, 1)[None], values[a:b].flatten(0, 1)[None]) for a, b in shape.ranges]
        asking = query[index] if rotated is not None else rope.rotate(query[index], row.query_rope)
        mixed.append(attend(asking[None], seen))
        if shape.adapt is not None:
            sink = caches.sink_keys[layer]
            adapt_sink((sink, caches.values[layer][: len(sink)]), (key[index], value[index]), shape.adapt, all_heads)
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


# ---- a ring whose sink takes chunks in -------------------------------------------------------------------------------
#
# Which slot a chunk's keys and values go to is decided on the device, after StreamDiffusionV2's published code
# (github.com/chenfengxu714/StreamDiffusionV2, `models/wan/causal_model.py`). A chunk is compared with every sink chunk
# before it is written. One that is unlike them takes the slot of the sink chunk that it is least like *instead of* its
# slot in the ring, which does not move on. Each layer of each cache decides for itself, so the host never knows which
# slot is next: the queue of slots lies on the device, and the slot is a tensor.

_WAITING, _STACK = 1, 2


class AdaptiveRing(NamedTuple):
    """What holds for many chunks of such a ring, see `StaticMetadata`.

    threshold: cosine below which a chunk counts as unlike the sink.
    sink: slots of the sink, the first of the cache.
    rolling: slots behind it.
    full: whether each of these has been written. Until then a chunk takes the next one whatever it is like; the sink
        slot that it would have taken waits, and is the next to be written once the ring is full (the newest first).
    """

    threshold: float
    sink: int
    rolling: int
    full: bool


def take_slot(
    ring: AdaptiveRing,
    queue: Tensor,
    sink: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    free: Tensor,
    all_heads: AllHeads | None = None,
) -> Tensor:
    """The slot, int64 `[1]`, that a chunk is written to. Nothing is read back to the host. Mutates: queue.

    Args:
        queue: the layer's, int64, see `CacheGeometry.sizes`.
        sink: rotated keys and values of its slots `[slots, tokens, H, d]`; zeros where none was written.
        own: those of the chunk `[tokens, H, d]`.
        free: the next free slot `[1]`, which it takes where the ring is not full.
        all_heads: as in `likeness`.
    """
    least, place = likeness(sink, own, all_heads).min(0, keepdim=True)
    unlike = least < ring.threshold
    following, waiting, stack = queue[:_WAITING], queue[_WAITING:_STACK], queue[_STACK:]
    if not ring.full:
        stack.index_copy_(0, waiting, place)  # without being counted it is not there
        waiting.add_(unlike.long())
        return free
    waits = (waiting > 0) & ~unlike
    newest = stack.index_select(0, (waiting - 1).clamp(min=0))
    rolls = ~(waits | unlike)
    slot = torch.where(rolls, ring.sink + following, torch.where(unlike, place, newest))
    waiting.sub_(waits.long())
    following.copy_((following + rolls) % ring.rolling)
    return slot


def likeness(sink: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], all_heads: AllHeads | None = None) -> Tensor:
    """How like a chunk is to each sink chunk, -1 to 1, float32 `[slots]`: the cosine of the means over tokens, of keys
    and of values, averaged; that of an empty slot is 0. Arguments as those of `take_slot`; where these are some of the
    heads, `all_heads` puts their means `[n, H, d]` together with those of the other ranks, which then find the same."""
    cosines = []
    for kept, new in zip(sink, own, strict=True):
        of_kept, of_new = kept.mean(1, dtype=torch.float32), new.mean(0, dtype=torch.float32)[None]
        if all_heads is not None:
            of_kept, of_new = all_heads(torch.cat([of_kept, of_new])).split((len(kept), 1))
        cosines.append(torch.cosine_similarity(of_kept.flatten(1), of_new.flatten(1)))
    return (cosines[0] + cosines[1]) / 2


# ---- several sessions whose caches are found by slot numbers in a pool -----------------------------------------------
# Nothing in it is bound to a session, so that one captured graph serves all.


class PooledRow(NamedTuple):
    """slot: pool slot that the row writes, int64 `[1]`. seen: indices of pool frames it sees, int64 `[n]`."""

    slot: Tensor
    seen: Tensor


def attend_pooled(
    whole: LayerCaches,
    layer: int,
    rows: Sequence[PooledRow],
    chunk: int,
    query: Tensor,
    rotated: Tensor,
    value: Tensor,
    attend: AttendParts,
    paged: AttendPaged | None = None,
) -> Tensor:
    """`attend_rows` for `plain` rows, of which queries and keys are rotated already. `chunk`: latent frames of a slot.
    With `paged` all rows write, then attend in one call, so no row may write what another sees; without it each row
    writes, then attends by `attend` to a copy of what it sees. Mutates: the pool."""
    keys, values = whole.keys[layer], whole.values[layer]
    frames = [each.unflatten(1, (chunk, -1)).flatten(0, 1) for each in (keys, values)]
    mixed = []
    for index, row in enumerate(rows):
        keys.index_copy_(0, row.slot, rotated[index, None])
        values.index_copy_(0, row.slot, value[index, None])
        if paged is None:
            mixed.append(attention_backend.row_by_row(attend, query[index, None], frames[0], frames[1], row.seen[None]))
    if paged is None:
        return torch.cat(mixed)
    return paged(query, frames[0], frames[1], torch.stack([row.seen for row in rows]))
