"""Memory budget for sessions (KV caches and decoder state) on every rank; refuses a session that does not fit.

Pure, but for `free_bytes`. Rank 0 keeps it for all ranks, since it opens the sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from streamdiff.config import ModelConfig, ServedModel
from streamdiff.device import host_memory
from streamdiff.errors import RequestError
from streamdiff.pipeline.planner.model_sizes import ModelSizes

_KEPT_BACK = 0.25
"""Share of a CPU's free memory that is left for everything else: viewers, and a MB of the web process for a session."""
_FOR_SWAPPED = 0.25
"""Share of the free host memory that sessions may take which are swapped out."""
_GB = 1e9
_SPARE_BYTES = 300_000_000
"""Host memory that a rank of a server's spare engine takes, which starts later."""


class PreallocatedCaches(NamedTuple):
    """Caches preallocated on every rank for sessions of one kind, because CUDA graphs are bound to them: for `sessions`
    as far as there is room, at least for one; and for up to `most` in half of the memory, so that others have room."""

    sessions: int
    steps: int
    kv_context: str
    most: int = 0


class RankMemory(NamedTuple):
    """A rank's `free` bytes for sessions, the bytes that each takes beside its caches (decoder state, if this rank
    decodes, and what cameras do to its blocks, where that is kept), and the bytes of host memory that it may fill with
    sessions that are swapped out."""

    free: int
    decoding: int = 0
    host: int = 0

    def holds(self, sessions: int, nbytes: int) -> int:
        """How many of `sessions` sessions fit whose caches have `nbytes` each."""
        return min(sessions, self.free // max(1, nbytes + self.decoding))

    def preallocates(self, kept: PreallocatedCaches, nbytes: int) -> int:
        """Of how many sessions, whose caches have `nbytes` each, caches are there from the start."""
        half = self._replace(free=self.free // 2)
        return max(1, self.holds(kept.sessions, nbytes), half.holds(kept.most, nbytes))


@dataclass
class KVCacheBudget:
    """Bytes of KV caches on every rank: `memory[r]` is what rank r had before anything was allocated, which runs
    `blocks[r]` blocks, and shares them with others, `shares` in all; numbers in caches have `value_bytes` bytes.
    Preallocated caches count whether sessions use them or not."""

    sizes: ModelSizes
    memory: Sequence[RankMemory]
    blocks: Sequence[int]
    value_bytes: int
    preallocated: PreallocatedCaches | None = None
    shares: int = 1
    _taken: dict[int, list[int]] = field(default_factory=dict)
    _away: dict[int, list[int]] = field(default_factory=dict)

    def need(self, *, steps: int, kv_context: str) -> list[int]:
        """Bytes of a session on every rank.

        Raises:
            RequestError: it does not fit, code "memory"; says on which rank, and the numbers.
        """
        need = self._need(steps, kv_context)
        self._check(need, f"its caches ({kv_context}, {steps} steps)")
        return need

    def _check(self, need: list[int], what: str) -> None:
        """Raises RequestError where `need` is not left on a rank."""
        for rank, wanted in enumerate(need):
            free, decoding, _ = self.memory[rank]
            left = free - sum(taken[rank] for taken in self._taken.values()) - self._unused(need)[rank]
            also = f" and {decoding / _GB:.3g} GB of decoder's memory" if decoding else ""
            if wanted > left:
                raise RequestError(
                    "session",
                    f"the session does not fit: {what}{also} need "
                    f"{wanted / _GB:.3g} GB on rank {rank}, where {left / _GB:.3g} of {free / _GB:.3g} GB are left "
                    f"({len(self._taken)} sessions open). Close one, or give more with model.device_memory_gb",
                    "memory",
                )

    def fits(self, *, steps: int, kv_context: str) -> int:
        """How many sessions like this fit, with none open."""
        return min(rank.free // need for rank, need in zip(self.memory, self._need(steps, kv_context), strict=True))

    def _unused(self, need: list[int]) -> list[int]:
        """Bytes on every rank of preallocated caches that stay unused when a session with this `need` is opened."""
        if self.preallocated is None:
            return [0] * len(need)
        kind = self._need(self.preallocated.steps, self.preallocated.kv_context)
        there = sum(each == kind for each in (*self._taken.values(), need))
        unused = []
        for each, rank in zip(kind, self.memory, strict=True):
            nbytes = each - rank.decoding
            unused.append(max(0, rank.preallocates(self.preallocated, nbytes) - there) * nbytes)
        return unused

    def _need(self, steps: int, kv_context: str) -> list[int]:
        return [
            rank.decoding
            + self.value_bytes * self.sizes.cache_values(count, steps=steps, kv_context=kv_context, shares=self.shares)
            for rank, count in zip(self.memory, self.blocks, strict=True)
        ]

    def take(self, session: int, need: list[int]) -> None:
        """Reserve the bytes of a session. Mutates: self."""
        self._taken[session] = need

    def cache_bytes(self, session: int) -> int:
        """Bytes of a session's caches on all ranks, which a snapshot has too; 0 while it is swapped out."""
        taken = self._taken.get(session, [])
        return sum(nbytes - rank.decoding for nbytes, rank in zip(taken, self.memory, strict=False))

    def give_back(self, session: int) -> None:
        """Release the bytes of a session. Mutates: self."""
        self._taken.pop(session, None)
        self._away.pop(session, None)

    def away_fits(self, session: int, spills: bool, returning: int | None = None) -> bool:
        """Whether a session may be swapped out, where another is `returning`: host memory has room for its part on
        every rank, or ranks write what is too much to disk (`spills`)."""
        away = [need for other, need in self._away.items() if other != returning]
        taken = [sum(parts) for parts in zip(self._taken[session], *away, strict=True)]
        return spills or all(nbytes <= rank.host for nbytes, rank in zip(taken, self.memory, strict=True))

    def away_count(self, *, steps: int, kv_context: str) -> int:
        """How many sessions like this host memory holds, with none away."""
        return min(
            rank.host // max(1, need) for rank, need in zip(self.memory, self._need(steps, kv_context), strict=True)
        )

    def swap_out(self, session: int) -> None:
        """A session's bytes are host memory's now. Mutates: self."""
        self._away[session] = self._taken.pop(session)

    def swap_in(self, session: int) -> None:
        """The other way. Mutates: self.

        Raises:
            RequestError: it does not fit, as `need`.
        """
        self._check(self._away[session], "caches of a session that was swapped out")
        self._taken[session] = self._away.pop(session)


def host_bytes(config: ModelConfig, sharers: int) -> int:
    """Bytes of host memory for this rank's swapped-out sessions, one of `sharers` equal shares of what is free; 0
    unless it serves."""
    if not isinstance(config, ServedModel):
        return 0
    if config.host_memory_gb is not None:
        return int(config.host_memory_gb * _GB / sharers)
    return int(_host_share(config, sharers) * _FOR_SWAPPED)


def free_bytes(config: ModelConfig, device: torch.device, sharers: int, work: int = 0, swapped: int = 0) -> int:
    """What this rank has for caches: what is free now, less on a GPU the `work` bytes that computing
    will take, and on a CPU, which `sharers` share, a quarter and the `swapped` bytes that sessions may take which are
    swapped out: there it is the same memory."""
    if device.type == "cuda":
        return max(0, torch.cuda.mem_get_info(device)[0] - work)
    return max(0, int(_host_share(config, sharers) * (1 - _KEPT_BACK)) - swapped)


def _host_share(config: ModelConfig, sharers: int) -> float:
    """Bytes of free host memory for this rank, one of `sharers`, without what a spare engine will take; half of it
    where what is kept of each session lies in memory too."""
    free = host_memory()[0] / sharers
    if isinstance(config, ServedModel):
        free -= _SPARE_BYTES * config.warm_standby
        free /= 2 if config.keep_s is not None and config.state_dir is None else 1
    return max(0.0, free)
