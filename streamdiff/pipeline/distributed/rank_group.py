"""Ranks that carry out exchanges of tensors together, and what every kind of such a group has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from streamdiff.pipeline.distributed.link import GroupBroken
from streamdiff.pipeline.distributed.nccl import FOREVER, bound_device


@dataclass(frozen=True)
class RankGroup:
    """This rank, number `index` among `ranks` (numbers of the default group, ascending), which exchange over `group`.
    All of them call its methods in the same order. Buffers are permanent, kept by shape: a group meets a few dozen."""

    exchange: ClassVar[str] = "exchange"
    """What the ranks do together, for error messages."""
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    records: dist.ProcessGroup | None = field(default=None, kw_only=True)
    """For numbers in host memory, which wait for no device; None: `group` is for these too."""
    _buffers: dict[tuple[object, ...], Tensor] = field(default_factory=dict, init=False)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def highest(self, number: int) -> int:
        """The highest of the ranks' numbers, the same on each; the host waits for the others to come here."""
        most = torch.tensor(number)
        self._carry_out(lambda: dist.all_reduce(most, dist.ReduceOp.MAX, group=self.records or self.group))
        return int(most)

    def _carry_out(self, collective: Callable[[], object]) -> None:
        """Call `collective`. Raises GroupBroken where it ends because another rank is gone."""
        try:
            collective()
        except RuntimeError as error:  # torch says an address at most
            others = tuple(rank for rank in self.ranks if rank != self.ranks[self.index])
            listed = ", ".join(map(str, self.ranks))
            raise GroupBroken(f"the {self.exchange} among ranks {listed} ended: {error}", others) from error

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A permanent buffer, made at first use. Mutates: self."""
        key = (name, shape, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._buffers[key]


def new_groups(
    ranks: Sequence[int], device: torch.device, options: Callable[[], dist.ProcessGroupNCCL.Options], name: str
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The `group` and `records` of these ranks: NCCL's with these `options` on CUDA, and gloo's for numbers of the
    host; else gloo's, and None. All ranks of the default group call this together."""
    on_cuda = device.type == "cuda"
    group = dist.new_group(
        list(ranks),
        timeout=FOREVER,
        backend="nccl" if on_cuda else "gloo",
        pg_options=options() if on_cuda else None,
        device_id=bound_device(device),
        group_desc=name,
    )
    return group, dist.new_group(list(ranks), timeout=FOREVER, backend="gloo") if on_cuda else None
