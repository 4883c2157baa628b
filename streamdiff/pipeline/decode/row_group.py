"""The ranks of the first stage as those that share pictures by rows, and the exchanges between them.

The group is decoding's own, beside that of the stage's forwards: a thread of each rank decodes, and all of them come to
the same exchanges in the same order, whatever the threads that run forwards do meanwhile (docs/decisions/0042).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from streamdiff.pipeline.distributed.nccl import edge_options
from streamdiff.pipeline.distributed.rank_group import RankGroup, new_groups


def row_bounds(height: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """First and last row (exclusive) of each of `ranks` ranks, as even as can be."""
    return tuple((height * rank // ranks, height * (rank + 1) // ranks) for rank in range(ranks))


@dataclass(frozen=True)
class RowGroup(RankGroup):
    """`RowExchange` of the first ranks of the default group, for latents of `height` rows. What comes back lies in no
    buffer."""

    exchange: ClassVar[str] = "exchange of rows"
    height: int

    @property
    def count(self) -> int:
        """Rows of the latents that this rank has."""
        first, end = self.bounds[self.index]
        return end - first

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """See `RowExchange`."""
        return row_bounds(self.height, self.size)

    def local_rows(self, whole: Tensor) -> Tensor:
        """See `RowExchange`."""
        scale, left = divmod(whole.shape[-2], self.height)
        if left or not scale:
            raise ValueError(f"there are {whole.shape[-2]} rows, but the ranks share pictures of {self.height}")
        first, end = self.bounds[self.index]
        return whole[..., first * scale : end * scale, :]

    def exchange_halo(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """See `RowExchange`: one exchange with both neighbours, however many parts there are."""
        padded = tuple(F.pad(part, (0, 0, 1, 1)) for part in parts)
        # A row of own ones to the rank above, another to the one below; as much comes from each. Inside are the edges.
        sides = [(1, 0)] * (self.index > 0) + [(-2, -1)] * (self.index < self.size - 1)
        counts = [part[..., :1, :].numel() for part in padded]
        shape = (len(sides), sum(counts))
        sent, received = (self._buffer(name, shape, padded[0]) for name in ("halo sent", "halo received"))
        splits = [shape[1] if abs(rank - self.index) == 1 else 0 for rank in self.ranks]
        for (inner, _), row in zip(sides, sent, strict=True):
            for part, place in zip(padded, row.split(counts), strict=True):
                place.view(part[..., inner, :].shape).copy_(part[..., inner, :])
        self._carry_out(
            lambda: dist.all_to_all_single(
                received.view(-1),
                sent.view(-1),
                splits,
                splits,
                group=self.group,  # nothing for those further away
            )
        )
        for (_, outer), row in zip(sides, received, strict=True):
            for part, place in zip(padded, row.split(counts), strict=True):
                part[..., outer, :].copy_(place.view(part[..., outer, :].shape))
        return padded

    def all_gather(self, own: Tensor) -> Tensor:
        """See `RowExchange`."""
        mine, gathered = self._to_gather("whole", own, receives=True)
        self._carry_out(lambda: dist.all_gather(gathered, mine, group=self.group))
        return self._joined(gathered, own)

    def gather_to_first(self, own: Tensor) -> Tensor:
        """See `RowExchange`."""
        mine, gathered = self._to_gather("first", own, receives=self.index == 0)
        self._carry_out(lambda: dist.gather(mine, gathered or None, 0, group=self.group))
        return self._joined(gathered, own) if gathered else own

    def warm_up(self, device: torch.device) -> None:
        """Carry out each exchange once: a communicator connects its ranks at first use, where their hosts wait for each
        other. All ranks call this together, before anything else is under way on their devices."""
        blank = torch.zeros(1, self.count, 1, device=device)
        self.exchange_halo(blank)
        self.all_gather(blank)
        self.gather_to_first(blank)

    def _to_gather(self, name: str, own: Tensor, receives: bool) -> tuple[Tensor, list[Tensor]]:
        """`own` in a buffer of as many rows as the rank with the most has, since all send as much; and buffers for what
        all send, none where nothing is received. Mutates: self."""
        most = max(end - first for first, end in self.bounds) * (own.shape[-2] // self.count)
        shape = (*own.shape[:-2], most, own.shape[-1])
        mine = self._buffer(f"{name} sent", shape, own)
        mine[..., : own.shape[-2], :].copy_(own)
        return mine, list(self._buffer(f"{name} received", (self.size, *shape), own).unbind()) if receives else []

    def _joined(self, gathered: Sequence[Tensor], own: Tensor) -> Tensor:
        scale = own.shape[-2] // self.count
        rows = [(end - first) * scale for first, end in self.bounds]
        return torch.cat([part[..., :count, :] for part, count in zip(gathered, rows, strict=True)], -2)


def make_row_group(ranks: int, height: int, device: torch.device) -> RowGroup | None:
    """The group of the first `ranks` ranks for latents of `height` rows, which is warm; None on every other rank.
    NCCL's on CUDA, with few multiprocessors, else gloo's. All ranks of the default group call this together. Mutates:
    this process's environment, see `nccl.group_options`."""
    group, records = new_groups(range(ranks), device, edge_options, "rows")
    if (rank := dist.get_rank()) >= ranks:
        return None
    rows = RowGroup(tuple(range(ranks)), rank, group, height, records=records)
    rows.warm_up(device)
    return rows
