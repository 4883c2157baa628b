"""Rolling caches of action modules, whose attention is over time: slots and windows are those of self-attention, with a
key and a value for each token of each latent frame (mouse), or for each latent frame (keyboard)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.spec import ActionModules
from streamdiff.models.transformer import rope
from streamdiff.models.transformer.attention_backend import attend
from streamdiff.pipeline.kv_cache.attention import AttentionMetadata
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry
from streamdiff.session_state.fields import BY_LAYER, BY_SHARE, session_state


@session_state("action-caches")
@dataclass
class ActionCaches:
    """Keys, rotated, and values `[caches, layers, slots, F, tokens, H, d]` of one session on one stage, allocated once
    and written in place; caches are as of `KVCache`, `layers` the stage's blocks up to the last one with an action
    module. Of the keyboard tokens is 1, of a mouse that is not there 0; ranks that share a stage have a share of the
    mouse's tokens each, and all of them the keyboard's."""

    mouse_key: Tensor = field(metadata=BY_SHARE)
    mouse_value: Tensor = field(metadata=BY_SHARE)
    keyboard_key: Tensor = field(metadata=BY_LAYER)
    keyboard_value: Tensor = field(metadata=BY_LAYER)

    @classmethod
    def allocate(
        cls, geometry: CacheGeometry, sizes: ActionModules, caches: int, layers: int, tokens: int, like: Tensor
    ) -> ActionCaches:
        """`tokens` of a latent frame, on this rank; `like`: a tensor of the dtype and device."""
        lead, head = (caches, layers, geometry.slots, geometry.chunk), (sizes.heads, sizes.head_dim)
        counts = (tokens if sizes.mouse else 0,) * 2 + (1, 1)
        return cls(*(like.new_zeros(*lead, count, *head) for count in counts))

    def rearrange(self, sources: Sequence[int]) -> None:
        """As `KVCache.rearrange`. Mutates: self."""
        for each in (getattr(self, own.name) for own in fields(self)):
            each[: len(sources)] = torch.stack([each[source] for source in sources])


class ActionRow(NamedTuple):
    """A row of a forward: its self-attention's metadata, which says its slot and what it sees, its session's caches and
    which of them, and rotary factors of its latent frames."""

    metadata: AttentionMetadata
    caches: ActionCaches
    cache: int
    factors: Tensor


def attend_over_time(
    rows: Sequence[ActionRow], what: str, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """An `AttendOverTime` over rows: each in turn writes its keys and values, then attends; later rows that it sees are
    written before. Mutates: the caches."""
    mixed, written = [], 0
    for index, row in enumerate(rows):
        metadata, factors = row.metadata, row.factors
        while written <= index + metadata.shape.visible_later_rows:
            _write(rows[written], what, layer, key[written], value[written])
            written += 1
        keys, values = (_seen(each.flatten(0, 1), metadata.shape.ranges) for each in _of(row, what, layer))
        asking = rope.rotate(query[index], factors)
        frames, tokens = asking.shape[:2]
        if keys.shape[1] == 1:  # the same for all tokens, which ask as so many more queries
            found = attend(asking.flatten(0, 1)[None], keys.transpose(0, 1), values.transpose(0, 1))
            mixed.append(found.unflatten(1, (frames, tokens))[0])
        else:
            found = attend(*(each.transpose(0, 1) for each in (asking, keys, values)))
            mixed.append(found.transpose(0, 1))
    return torch.stack(mixed)


def _seen(whole: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The latent frames in these ranges, without a copy where they lie together."""
    parts = [whole[begin:end] for begin, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _write(row: ActionRow, what: str, layer: int, key: Tensor, value: Tensor) -> None:
    keys, values = _of(row, what, layer)
    slot = row.metadata.tensors.slot
    keys.index_copy_(0, slot, rope.rotate(key, row.factors)[None])
    values.index_copy_(0, slot, value[None])


def _of(row: ActionRow, what: str, layer: int) -> tuple[Tensor, Tensor]:
    """A row's keys and values `[slots, F, tokens, H, d]` of a layer."""
    own = row.caches
    both = (own.mouse_key, own.mouse_value) if what == "mouse" else (own.keyboard_key, own.keyboard_value)
    return both[0][row.cache, layer], both[1][row.cache, layer]
