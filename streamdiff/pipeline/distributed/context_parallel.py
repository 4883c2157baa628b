"""Context parallelism: the ranks of a stage share each forward, by tokens and by heads.

After DeepSpeed Ulysses (arXiv 2309.14509). A rank has 1/C of the tokens of every latent frame, for all that is computed
token by token, attention to text included. For self-attention an all-to-all gives it all tokens of H/C heads, the only
ones that its cache holds, so positions, window, sink and eviction are those of one rank; another one brings its tokens
back. Tokens are split within every frame, so whatever goes by frame is the same for any number of frames.

R rows, F latent frames, L tokens, l = L/C those of one rank, H heads, d head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from streamdiff.pipeline.distributed.link import GroupBroken
from streamdiff.pipeline.distributed.nccl import FOREVER, bound_device, group_options


@dataclass(frozen=True)
class ContextGroup:
    """The ranks of a stage, C of them, with `frames` latent frames of a chunk: this one is number `index` among `ranks`
    (numbers of the default group, ascending), which exchange over `group`. They call its methods in the same order with
    the same shapes. What these return lies in permanent buffers that the next call of the same method writes again."""

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    frames: int
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

    def own_tokens(self, hidden: Tensor) -> Tensor:
        """This rank's `[R, l, D]` of the hidden states `[R, L, D]` of all tokens."""
        share: Tensor = hidden.unflatten(1, (self.frames, self.size, -1))[:, :, self.index].flatten(1, 2)
        return share

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From all heads of own tokens, all `[R, l, H, d]`, to all tokens of own heads `[R, L, H/C, d]`."""
        rows, tokens, heads, width = query.shape
        shape = (self.size, 3, rows, self.frames, tokens // self.frames, heads // self.size, width)
        sent = self._buffer("to heads", shape, query)
        for place, part in enumerate((query, key, value)):
            split = part.unflatten(2, (self.size, -1)).unflatten(1, (self.frames, -1))
            sent[:, place].copy_(split.permute(3, 0, 1, 2, 4, 5))
        received = self._all_to_all("all tokens", sent)
        whole = self._buffer("heads", (*shape[1:4], self.size, *shape[4:]), query)
        whole.copy_(received.permute(1, 2, 3, 0, 4, 5, 6))
        query, key, value = whole.flatten(2, 4).unbind()
        return query, key, value

    def to_tokens(self, mixed: Tensor) -> Tensor:
        """The way back: from all tokens of own heads `[R, L, H/C, d]` to all heads of own tokens `[R, l, H, d]`."""
        rows, tokens, heads, width = mixed.shape
        own = tokens // self.frames // self.size
        sent = self._buffer("to tokens", (self.size, rows, self.frames, own, heads, width), mixed)
        sent.copy_(mixed.unflatten(1, (self.frames, self.size, own)).permute(2, 0, 1, 3, 4, 5))
        received = self._all_to_all("all heads", sent)
        whole = self._buffer("tokens", (rows, self.frames, own, self.size, heads, width), mixed)
        whole.copy_(received.permute(1, 2, 3, 0, 4, 5))
        return whole.flatten(3, 4).flatten(1, 2)

    def tokens_on_first(self, own: Tensor) -> Tensor | None:
        """What all ranks have of something by token, from own `[R, l, n]` to `[R, L, n]` on the first of them; None on
        the others, which do not wait for each other."""
        own, lead = own.unflatten(1, (self.frames, -1)).contiguous(), self.index == 0
        gathered = self._buffer("output", (self.size, *own.shape), own) if lead else None
        parts = None if gathered is None else list(gathered.unbind())
        self._carry_out(lambda: dist.gather(own, parts, dst=self.ranks[0], group=self.group))
        return None if gathered is None else gathered.permute(1, 2, 0, 3, 4).flatten(1, 3)

    def all_heads(self, own: Tensor) -> Tensor:
        """What all ranks have of something by head, from own `[n, H/C, d]` to `[n, H, d]`, the same on each."""
        gathered, own = self._buffer("means", (self.size, *own.shape), own), own.contiguous()
        self._carry_out(lambda: dist.all_gather(list(gathered.unbind()), own, group=self.group))
        return gathered.transpose(0, 1).flatten(1, 2)

    def _all_to_all(self, name: str, sent: Tensor) -> Tensor:
        """Part c of `sent` `[C, ...]` goes to rank c of the stage; what comes, by rank `[C, ...]`."""
        received = self._buffer(name, tuple(sent.shape), sent)
        self._carry_out(lambda: dist.all_to_all_single(received, sent, group=self.group))
        return received

    def _carry_out(self, collective: Callable[[], object]) -> None:
        """Call `collective`. Raises GroupBroken where it ends because another rank is gone."""
        try:
            collective()
        except RuntimeError as error:  # torch says an address at most
            others = tuple(rank for rank in self.ranks if rank != self.ranks[self.index])
            listed = ", ".join(map(str, self.ranks))
            raise GroupBroken(f"the exchange among ranks {listed} ended: {error}", others) from error

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A permanent buffer, made at first use. Mutates: self."""
        key = (name, shape, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._buffers[key]


def stage_group(stages: int, size: int, frames: int, device: torch.device) -> ContextGroup | None:
    """This rank's group where each of `stages` stages has `size` ranks, those of a stage one after the other; None on a
    rank of no stage, and where each stage has one rank. All ranks of the default group call this together. Mutates:
    this process's environment, see `nccl.group_options`."""
    if size == 1:
        return None
    rank, found, on_cuda = dist.get_rank(), None, device.type == "cuda"
    for stage in range(stages):
        ranks = tuple(range(stage * size, (stage + 1) * size))
        group = dist.new_group(
            list(ranks),
            timeout=FOREVER,
            backend="nccl" if on_cuda else "gloo",
            pg_options=group_options() if on_cuda else None,
            device_id=bound_device(device),
            group_desc=f"stage {stage}",
        )
        records = dist.new_group(list(ranks), timeout=FOREVER, backend="gloo") if on_cuda else None
        if rank in ranks:
            found = ContextGroup(ranks, ranks.index(rank), group, frames, records=records)
    return found
