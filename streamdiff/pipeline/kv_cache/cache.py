"""The KV cache tensors of one session on one stage, allocated once and written in place; and a pool of such caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from streamdiff.pipeline.kv_cache.geometry import CacheGeometry
from streamdiff.session_state.fields import BY_LAYER, BY_SHARE, DERIVED, STATE, reset, session_state


class LayerCaches(NamedTuple):
    """Of each layer keys and values `[slots, tokens, H, d]`, un-rotated keys of the sink's slots
    `[pinned, tokens, H, d]`, and the queue of slots of an adaptive ring."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    sink_keys: tuple[Tensor, ...]
    queues: tuple[Tensor, ...]


class CacheSizes(TypedDict):
    """Sizes of a stage's caches beside their slots. `like`: a tensor of the dtype and device."""

    layers: int
    tokens: int
    heads: int
    head_dim: int
    like: Tensor


@session_state("kv-cache")
@dataclass
class KVCache:
    """One session's caches on one stage, allocated once and written in place.

    key and value are `[caches, layers, slots, tokens, H, d]`: one cache for the contexts `clean` and `staircase`, one
    per step for `same_step`; `layers` are the stage's own blocks, `tokens` those of a chunk. Keys are
    rotated; those of the slots that the sink is in are kept un-rotated too, in sink_key, as the sink's place moves
    (none in an adaptive ring, where it does not). queue is int64 `[caches, layers, n]`, which slot of an adaptive ring
    is next (see `CacheGeometry.sizes`; n is 0 elsewhere). sink_at is, by cache, the position that the sink's keys are
    rotated for.
    """

    key: Tensor = field(metadata=BY_SHARE)
    value: Tensor = field(metadata=BY_SHARE)
    sink_key: Tensor = field(metadata=BY_SHARE)
    queue: Tensor = field(metadata=BY_LAYER)
    sink_at: dict[int, int] = field(default_factory=dict, kw_only=True, metadata=STATE)
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
    def allocate(cls, geometry: CacheGeometry, *, caches: int, **sizes: Unpack[CacheSizes]) -> KVCache:
        return cls(*_blank(geometry, (caches, sizes["layers"]), sizes))

    def layers(self, cache: int) -> LayerCaches:
        """One of the caches, layer by layer."""
        return self._layers[cache]

    def move_sink(self, cache: int, first: int | None) -> bool:
        """Record that this cache's sink keys are rotated for a sink that begins at position `first`; None: not valid,
        as the sink has changed. Returns whether the record changes. Mutates: self."""
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

    def _place_sinks(self, sources: Sequence[int]) -> None:
        before = self.sink_at
        self.sink_at = {cache: before[source] for cache, source in enumerate(sources) if source in before}


def _blank(geometry: CacheGeometry, lead: tuple[int, ...], sizes: CacheSizes) -> tuple[Tensor, ...]:
    """Empty keys, values and un-rotated sink keys `[*lead, slots, tokens, H, d]`, and queues of slots `[*lead, n]`."""
    count, moved, length = geometry.sizes
    slots, pinned = ((*lead, each, sizes["tokens"], sizes["heads"], sizes["head_dim"]) for each in (count, moved))
    new = sizes["like"].new_zeros
    return new(slots), new(slots), new(pinned), new((*lead, length), dtype=torch.int64)


class CachePool:
    """Caches of several sessions of one kind on a stage, of each layer in one tensor, for graphs that are bound to
    addresses: whichever session has caches of the pool, its keys and values are found by slot numbers. Caches have
    numbers too: slot s of cache n is slot `n * slots + s` of the pool.

    The tensors are `[layers, sessions, caches, slots, tokens, H, d]` and never freed; what a session has is a view.
    """

    def __init__(self, geometry: CacheGeometry, sessions: int, *, caches: int, **sizes: Unpack[CacheSizes]) -> None:
        self.slots = geometry.slots
        whole = _blank(geometry, (sizes["layers"], sessions, caches), sizes)
        keys, values = (tuple(each.flatten(1, 3).unbind()) for each in whole[:2])
        self.whole = LayerCaches(keys, values, (), ())
        """Of each layer keys and values `[slots of all, tokens, H, d]`."""
        self._geometry, self.caches = geometry, caches
        self._all = [KVCache(*(each[:, number].transpose(0, 1) for each in whole)) for number in range(sessions)]
        self._free = list(self._all)
        self._numbers = {
            state.layers(cache).keys[0].data_ptr(): number * caches + cache
            for number, state in enumerate(self._all)
            for cache in range(caches)
        }

    @property
    def sessions(self) -> int:
        """How many sessions have room."""
        return len(self._all)

    def take(self, geometry: CacheGeometry, caches: int) -> KVCache | None:
        """Empty caches for a session of this kind; None: it is of another, or all are taken. Mutates: self."""
        if (geometry, caches) != (self._geometry, self.caches) or not self._free:
            return None
        state = self._free.pop(0)
        reset(state)
        return state

    def give_back(self, state: KVCache) -> None:
        """Let caches be another session's, if they are the pool's. Mutates: self."""
        if any(state is each for each in self._all):
            self._free.append(state)

    def number_of(self, caches: LayerCaches) -> int | None:
        """The number of a cache; None: it is not the pool's."""
        return self._numbers.get(caches.keys[0].data_ptr())
