"""Memory for sessions (their caches, and what the decoder remembers): what every rank has, what a session needs, the
refusal of one too many.

Pure: bytes in, an error out. The head keeps it for all ranks, since it opens the sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import torch

from streamdiff.errors import RequestError
from streamdiff.pipeline.planner.model_sizes import ModelSizes

_KEPT_BACK = 0.1
"""Share of the free memory that is left for everything else."""
_GB = 1e9


class RankMemory(NamedTuple):
    """A rank's `free` bytes for sessions, and the bytes that its decoder, if it has one, remembers of each."""

    free: int
    decoding: int = 0

    def holds(self, sessions: int, nbytes: int) -> int:
        """How many of so many sessions there is room for whose caches have `nbytes`."""
        return min(sessions, self.free // max(1, nbytes + self.decoding))


class PreallocatedCaches(NamedTuple):
    """On every rank caches are there already, for so many `sessions` of one kind; where there is less room, for as many
    as it holds, at least one."""

    sessions: int
    steps: int
    kv_context: str


@dataclass
class KVCacheBudget:
    """`room[r]` is what rank r had before anything was allocated, which runs `blocks[r]` blocks; numbers in caches have
    `value_bytes` bytes. Caches that wait for sessions take memory whether there are such sessions or not."""

    facts: ModelSizes
    room: Sequence[RankMemory]
    blocks: Sequence[int]
    value_bytes: int
    waiting: PreallocatedCaches | None = None
    _taken: dict[int, list[int]] = field(default_factory=dict)

    def need(self, *, steps: int, kv_context: str) -> list[int]:
        """Bytes of a session on every rank.

        Raises:
            RequestError: it does not fit, code "memory"; says on which rank, and the numbers.
        """
        need = self._need(steps, kv_context)
        for rank, wanted in enumerate(need):
            free, decoding = self.room[rank]
            left = free - sum(taken[rank] for taken in self._taken.values()) - self._unused(need)[rank]
            also = f" and {decoding / _GB:.3g} GB of decoder's memory" if decoding else ""
            if wanted > left:
                raise RequestError(
                    "session",
                    f"the session does not fit: its caches ({kv_context}, {steps} steps){also} need "
                    f"{wanted / _GB:.3g} GB on rank {rank}, where {left / _GB:.3g} of {free / _GB:.3g} GB are left "
                    f"({len(self._taken)} sessions open). Close one, or give more with model.memory_gb",
                    "memory",
                )
        return need

    def fits(self, *, steps: int, kv_context: str) -> int:
        """How many sessions like this there is room for, with none open."""
        return min(room.free // need for room, need in zip(self.room, self._need(steps, kv_context), strict=True))

    def _unused(self, need: list[int]) -> list[int]:
        """Bytes of caches on every rank that still wait for other sessions when one that needs so much has come."""
        if self.waiting is None:
            return [0] * len(need)
        sessions, steps, kv_context = self.waiting
        kind = self._need(steps, kv_context)
        there = sum(each == kind for each in (*self._taken.values(), need))
        unused = []
        for each, room in zip(kind, self.room, strict=True):
            nbytes = each - room.decoding
            unused.append(max(0, max(1, room.holds(sessions, nbytes)) - there) * nbytes)
        return unused

    def _need(self, steps: int, kv_context: str) -> list[int]:
        return [
            room.decoding + self.value_bytes * self.facts.cache_values(count, steps=steps, kv_context=kv_context)
            for room, count in zip(self.room, self.blocks, strict=True)
        ]

    def take(self, session: int, need: list[int]) -> None:
        """The session is open. Mutates: self."""
        self._taken[session] = need

    def give_back(self, session: int) -> None:
        """The session is closed. Mutates: self."""
        self._taken.pop(session, None)


def free_bytes(device: torch.device, sharers: int, memory_gb: float | None) -> int:
    """What this rank has for caches: `memory_gb`, or what is free now less a tenth; on a CPU `sharers` share that."""
    if memory_gb is not None:
        return round(memory_gb * _GB)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * (1 - _KEPT_BACK))
    return int(psutil.virtual_memory().available * (1 - _KEPT_BACK) / sharers)
