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
    """The part of a row's attention metadata that holds for many chunks: a compiled graph is made for one, see
    `pipeline.runner.compiled_stage`. Counts and positions are in latent frames.

    chunk: frames in a slot.
    sink_frames: how many of the row's own frames, the first, belong to the sink.
    sink: frames of the sink that the row sees.
    window_frames: other cached frames that it sees, its own included.
    contiguous_range: their first position and the one after the last, where they are adjacent; None: `gather_index`.
    adapt: cosine below which the row replaces the least similar sink chunk.
    fold: weight that the sink keeps when the evicted chunk is averaged into it.
    ahead: later rows of the forward that the row sees, since they are made together.
    """

    chunk: int
    sink_frames: int
    sink: int
    window_frames: int
    contiguous_range: tuple[int, int] | None
    adapt: float | None = None
    fold: float | None = None
    ahead: int = 0


class TensorMetadata(NamedTuple):
    """The part of a row's attention metadata that changes with chunk or session, all on the device.

    keys, values: slots of each layer `[slots, tokens, H, d]`.
    slot: the slot that the row writes `[1]`.
    gather_index: latent frames `[n]` that it sees beyond the sink; None where they are contiguous.
    query_rope: rotary factors of its queries and, except in the sink, its keys.
    sink_rope: those of the sink's keys, which are cached un-rotated; None without a sink.
    inverse_rope: those that undo the rotation of the evicted chunk's keys; None where nothing is folded.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    slot: Tensor
    gather_index: Tensor | None
    query_rope: Tensor
    sink_rope: Tensor | None
    inverse_rope: Tensor | None


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
        visible_from_chunk: int = 0,
        adapt: float | None = None,
        fold: float | None = None,
        ahead: int = 0,
    ) -> AttentionMetadata:
        """Attention metadata of one row, that of `chunk`.

        Args:
            visible_from_chunk: first visible chunk outside the sink.
            adapt: replace the least similar sink chunk where its cosine to this one is below this.
            fold: weight that the sink keeps when the evicted chunk is averaged into it.
            ahead: number of later rows of this forward that are visible.
        """
        sink, first = plan.frames(chunk + ahead, visible_from_chunk)
        begin, end, gone = chunk * plan.chunk, (chunk + ahead + 1) * plan.chunk, plan.evicted(chunk)
        places = tuple(sorted(plan.place(frame) for frame in range(first, end)))
        contiguous, sink_frames = self._contiguous(plan, places), min(max(plan.sink - begin, 0), plan.chunk)
        adapt = adapt if plan.sink and not sink_frames else None
        fold = fold if gone >= max(plan.pinned, visible_from_chunk) else None
        shape = StaticMetadata(plan.chunk, sink_frames, sink, len(places), contiguous, adapt, fold, ahead)
        keys, values = state.layers(cache)
        slot, gather_index = self._index((plan.slot(chunk),)), self._index(places) if contiguous is None else None
        # Relative: the sink's last frame is followed by the window's first, so count back from there.
        sink_rope = self._table(0 if plan.absolute else first - sink, sink) if sink else None
        inverse_rope = self._table(gone * plan.chunk, plan.chunk, True) if fold is not None else None
        query_rope = self._table(begin, plan.chunk)
        tensors = TensorMetadata(keys, values, slot, gather_index, query_rope, sink_rope, inverse_rope)
        return AttentionMetadata(shape, tensors)

    def on(self, rows: list[AttentionMetadata]) -> RollingAttention:
        """Point at the rows of the next forward. Mutates: self."""
        self.rows = rows
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `models.transformer.wan.SelfAttention`; `layer` counts the stage's blocks. Mutates: the rows' states."""
        return attend_rows(self.rows, layer, query, key, value, self.attend)

    def _contiguous(self, plan: CacheGeometry, places: tuple[int, ...]) -> tuple[int, int] | None:
        """First position and the one after the last, where `places` are adjacent; compiled only where they are all."""
        first = places[0] if places else plan.sink
        whole = len(places) in (0, (plan.slots - plan.pinned) * plan.chunk)
        adjacent = places == tuple(range(first, first + len(places)))
        return (first, first + len(places)) if adjacent and (whole or not self.compiled) else None

    def _make_index(self, places: tuple[int, ...]) -> Tensor:
        index = torch.tensor(places)
        if self.device.type == "cuda":  # from pageable memory the host would wait for the copy
            index = index.pin_memory().to(self.device, non_blocking=True)
        return index

    def _make_table(self, first: int, count: int, inverse: bool = False) -> Tensor:
        factors = self._grid.factors(range(first, first + count))
        return torch.view_as_real(factors.conj().resolve_conj() if inverse else factors).contiguous()


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
        seen_keys, seen_values = _window(keys, shape, row), _window(values, shape, row)
        if row.sink_rope is not None:
            sink = rope.rotate(_frames(keys, shape)[: shape.sink].flatten(0, 1), row.sink_rope)
            seen_keys = torch.cat([sink, seen_keys])
            seen_values = torch.cat([_frames(values, shape)[: shape.sink].flatten(0, 1), seen_values])
        turned = rope.rotate(query[index], row.query_rope)
        mixed.append(attend(turned[None], seen_keys[None], seen_values[None]))
        if shape.adapt is not None:
            count = shape.sink // shape.chunk
            adapt_sink((keys[:count], values[:count]), (key[index], value[index]), shape.adapt)
    return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def _write(view: AttentionMetadata, layer: int, key: Tensor, value: Tensor) -> None:
    """Put a row's keys and values `[L, H, d]` into its slot. Mutates: the caches."""
    shape, row = view
    keys, values = row.keys[layer], row.values[layer]
    if shape.fold is not None and row.inverse_rope is not None:
        gone = rope.rotate(keys.index_select(0, row.slot)[0], row.inverse_rope), values.index_select(0, row.slot)[0]
        fold_into_sink((keys[0], values[0]), gone, shape.fold)
    keys.index_copy_(0, row.slot, _cached_keys(shape, row, key)[None])
    values.index_copy_(0, row.slot, value[None])


def _cached_keys(shape: StaticMetadata, row: TensorMetadata, key: Tensor) -> Tensor:
    """A row's keys `[tokens, H, d]` as they are kept: rotated, but for those of the sink."""
    if shape.sink_frames == shape.chunk:
        return key
    turned = rope.rotate(key, row.query_rope)
    sink = shape.sink_frames * len(key) // shape.chunk
    return torch.cat([key[:sink], turned[sink:]]) if sink else turned


def _frames(slots: Tensor, shape: StaticMetadata) -> Tensor:
    """Slots `[slots, tokens, H, d]` as latent frames `[slots * chunk, tokens of one, H, d]`."""
    frames: Tensor = slots.unflatten(1, (shape.chunk, -1))
    return frames.flatten(0, 1)


def _window(slots: Tensor, shape: StaticMetadata, row: TensorMetadata) -> Tensor:
    """Keys or values that a row sees beyond the sink, `[tokens, H, d]`."""
    frames = _frames(slots, shape)
    if shape.contiguous_range is not None:
        return frames[slice(*shape.contiguous_range)].flatten(0, 1)
    assert row.gather_index is not None
    return frames.index_select(0, row.gather_index).flatten(0, 1)


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
