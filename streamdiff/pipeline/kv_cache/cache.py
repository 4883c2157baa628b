"""The KV cache tensors of one session on one stage, allocated once and written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.pipeline.kv_cache.geometry import CacheGeometry
from streamdiff.session_state.fields import BY_HEAD, BY_LAYER, DERIVED, STATE, session_state


class LayerCaches(NamedTuple):
    """Of each layer keys and values `[slots, tokens, H, d]`, un-rotated keys of the sink's slots
    `[pinned, tokens, H, d]`, and the queue of slots of an adaptive ring."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    sink_keys: tuple[Tensor, ...]
    queues: tuple[Tensor, ...]


@session_state("kv-cache")
@dataclass
class KVCache:
    """One session's caches on one stage, allocated once and written in place.

    key and value are `[caches, layers, slots, tokens, H, d]`: one cache for the contexts `clean` and `staircase`, one
    per step for `matched` and `anchored`; `layers` are the stage's own blocks, `tokens` those of a chunk. Keys are
    rotated; those of the slots that the sink is in are kept un-rotated too, in sink_key, as the sink's place moves
    (none in an adaptive ring, where it does not). queue is int64 `[caches, layers, n]`, which slot of an adaptive ring
    is next (see `geometry.queue_length`; n is 0 elsewhere). sink_at is, by cache, the position that the sink's keys are
    rotated for.
    """

    key: Tensor = field(metadata=BY_HEAD)
    value: Tensor = field(metadata=BY_HEAD)
    sink_key: Tensor = field(metadata=BY_HEAD)
    queue: Tensor = field(metadata=BY_LAYER)
    sink_at: dict[int, int] = field(default_factory=dict, metadata=STATE)
    _layers: list[LayerCaches] = field(init=False, repr=False, metadata=DERIVED)

    def __post_init__(self) -> None:
        self.derive()

    def derive(self) -> None:
        """Make the views of the tensors: once, as there are some for every block, and every micro-step needs them.
        Mutates: self."""
        self._layers = [
            LayerCaches(*(each.unbind() for each in parts))
            for parts in zip(self.key, self.value, self.sink_key, self.queue, strict=True)
        ]

    @classmethod
    def allocate(
        cls, plan: CacheGeometry, *, caches: int, layers: int, tokens: int, heads: int, head_dim: int, like: Tensor
    ) -> KVCache:
        count, moved, length = plan.sizes
        slots, pinned = ((caches, layers, count, tokens, heads, head_dim) for count in (count, moved))
        queue = like.new_zeros((caches, layers, length), dtype=torch.int64)
        return cls(like.new_zeros(slots), like.new_zeros(slots), like.new_zeros(pinned), queue)

    def serves(self, plan: CacheGeometry, caches: int) -> bool:
        """Whether it is what `allocate` would make, for the same model."""
        return len(self.key) == caches and plan.sizes == tuple(
            each.shape[2] for each in (self.key, self.sink_key, self.queue)
        )

    def layers(self, cache: int) -> LayerCaches:
        """One of the caches, layer by layer."""
        return self._layers[cache]

    def move_sink(self, cache: int, first: int | None) -> bool:
        """Note that the sink's keys in this cache are now rotated for a sink that begins at position `first`; None: for
        none, as it has another content. Returns whether they were not. Mutates: self."""
        moved = self.sink_at.get(cache) != first
        if first is None:
            self.sink_at.pop(cache, None)
        else:
            self.sink_at[cache] = first
        return moved

    def share(self, cache: int, slot: int) -> None:
        """Let all caches have what is in this slot of one of them. Mutates: self."""
        for whole in (self.key, self.value, self.sink_key):
            if slot < whole.shape[2]:
                whole[:, :, slot] = whole[cache, :, slot].clone()
        if slot < self.sink_key.shape[2]:
            self._place_sinks([cache] * len(self.key))

    def rearrange(self, sources: Sequence[int]) -> None:
        """Let cache i hold what cache `sources[i]` held, for each of `sources`. Mutates: self."""
        for caches in (self.key, self.value, self.sink_key, self.queue):
            caches[: len(sources)] = torch.stack([caches[source] for source in sources])
        self._place_sinks([*sources, *range(len(sources), len(self.key))])

    def begin_ring(self, cache: int) -> None:
        """Let one of the caches fill its adaptive ring anew behind the sink. Mutates: self."""
        self.queue[cache].zero_()

    def _place_sinks(self, sources: Sequence[int]) -> None:
        before = self.sink_at
        self.sink_at = {cache: before[source] for cache, source in enumerate(sources) if source in before}
