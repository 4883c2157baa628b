"""Self-attention of a forward of several sessions whose caches are found by slot numbers in a pool: nothing in it is
bound to a session, so that one captured graph serves all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.transformer.attention_backend import AttendParts
from streamdiff.models.transformer.varlen_attention import AttendPaged, row_by_row
from streamdiff.pipeline.kv_cache.attention import Projected
from streamdiff.pipeline.kv_cache.cache import LayerCaches


class PooledRow(NamedTuple):
    """slot: pool slot that the row writes, int64 `[1]`. seen: indices of pool frames it sees, int64 `[n]`."""

    slot: Tensor
    seen: Tensor


def attend_pooled(
    whole: LayerCaches,
    layer: int,
    rows: Sequence[PooledRow],
    chunk: int,
    projected: Projected,
    attend: AttendParts,
    paged: AttendPaged | None = None,
) -> Tensor:
    """`attend_rows` for `plain` rows. `chunk`: latent frames of a slot. With `paged` all rows write, then attend in one
    call, so no row may write what another sees; without it each row writes, then attends by `attend` to a copy of
    what it sees. Mutates: the pool."""
    keys, values = whole.keys[layer], whole.values[layer]
    frames = [each.unflatten(1, (chunk, -1)).flatten(0, 1) for each in (keys, values)]
    mixed = []
    for index, row in enumerate(rows):
        rotated = projected.key[index]
        assert rotated is not None, "compiled parts rotate keys"
        keys.index_copy_(0, row.slot, rotated[None])
        values.index_copy_(0, row.slot, projected.value[index][None])
        if paged is None:
            mixed.append(row_by_row(attend, projected.query[index][None], frames[0], frames[1], row.seen[None]))
    if paged is None:
        return torch.cat(mixed)
    return paged(torch.stack(list(projected.query)), frames[0], frames[1], torch.stack([row.seen for row in rows]))
