"""Low-rank branches beside the linear layers of blocks: the LoRAs of rows that have some, unmerged.

A row without one is computed as if there were none. What a branch adds to a row depends on nothing beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from streamdiff.session_state.fields import session_state

LAYERS = (
    *(f"attn{number}.{name}" for number in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ffn.net.0.proj",
    "ffn.net.2",
)
"""Those of a block that can have a branch, by diffusers' names."""


@session_state("factors")
class Factors(NamedTuple):
    """A branch of one layer: `down` `[rank, inputs]` and `up` `[outputs, rank]`, whose product is added at scale 1."""

    down: Tensor
    up: Tensor


BlockFactors = Mapping[str, Factors]
"""The branches of a block, by layer (LAYERS)."""


class Branch(NamedTuple):
    """A LoRA of rows `first` to `end` (exclusive) of a forward, in one block."""

    first: int
    end: int
    factors: BlockFactors
    scale: float


def add_branches(branches: Sequence[Branch], layer: str, given: Tensor, result: Tensor) -> Tensor:
    """What the linear layer `layer` of a block has made of `given`, both `[R, ...]`, with its branches. Mutates:
    result."""
    for first, end, factors, scale in branches:
        if (pair := factors.get(layer)) is not None:
            result[first:end] += F.linear(F.linear(given[first:end], pair.down) * scale, pair.up)
    return result
