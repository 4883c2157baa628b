"""The KV cache tensors of one session on one stage, allocated once and written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from streamdiff.pipeline.kv_cache.geometry import CacheGeometry


@dataclass
class KVCache:
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
        cls, plan: CacheGeometry, *, caches: int, layers: int, tokens: int, heads: int, head_dim: int, like: Tensor
    ) -> KVCache:
        shape = (caches, layers, plan.slots, tokens, heads, head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def layers(self, cache: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values `[slots, tokens, H, d]` of each layer in one of the caches."""
        return self._layers[cache]

    def share(self, cache: int, slot: int) -> None:
        """Let all caches have what is in this slot of one of them. Mutates: self."""
        for field in fields(self):
            whole = getattr(self, field.name)
            whole[:, :, slot] = whole[cache, :, slot].clone()

    def rearrange(self, sources: Sequence[int]) -> None:
        """Let cache i hold what cache `sources[i]` held, for each of `sources`. Mutates: self."""
        for field in fields(self):
            caches = getattr(self, field.name)
            caches[: len(sources)] = torch.stack([caches[source] for source in sources])

    def reset(self) -> None:
        """Forget the stream. Mutates: self."""
        for field in fields(self):
            getattr(self, field.name).zero_()
