"""A ring whose sink takes chunks in: which slot a chunk's keys and values go to is decided on the device.

After StreamDiffusionV2's published code (github.com/chenfengxu714/StreamDiffusionV2, `models/wan/causal_model.py`). A
chunk is compared with every sink chunk before it is written. One that is unlike them takes the slot of the sink chunk
that it is least like *instead of* its slot in the ring, which does not move on. Each layer of each cache decides for
itself, so the host never knows which slot is next: the queue of slots lies on the device, and the slot is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

AllHeads = Callable[[Tensor], Tensor]
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
        queue: the layer's, int64, see `geometry.queue_length`.
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
