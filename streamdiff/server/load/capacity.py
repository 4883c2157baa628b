"""Limits of sessions: how many an engine can play, from what a chunk costs, and how long each may last. Pure.

Memory is not counted here: the engine refuses a session whose caches do not fit, see `pipeline/planner/kv_budget.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from streamdiff.errors import StreamdiffError

FRESH_S = 30.0
"""How long a measurement says how busy the machine is."""
EndReason = Literal["idle", "lifetime"]


class Unavailable(StreamdiffError):
    """What cannot be had now. `code`, of a session: `time`, `memory`, `draining`, `restarting` or `engine`; of a job:
    `queue`, `address`, `disk` (the limit of kept videos) or `storage` (the disk takes nothing)."""

    def __init__(self, code: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


@dataclass
class Capacity:
    """Compute capacity of an engine that makes chunks of `chunk_frames` frames, by default in `steps` steps.

    `limit`: share of the engine's time that all sessions may ask for together.
    `start_work_s`: seconds of work in a chunk in `steps` steps, as measured while the engine started; None: it was not.
    """

    chunk_frames: int
    steps: int
    limit: float
    start_work_s: float | None = None
    _latest: tuple[float, float] | None = field(default=None, init=False)
    """Seconds of work in a chunk, and when that was measured."""

    def restart(self, work_s: float | None) -> None:
        """Another engine, which measured `work_s` while it started (None: it did not). Mutates: self."""
        if work_s is not None:
            self.start_work_s, self._latest = work_s, None

    def measured(self, work_s: float, now_s: float) -> None:
        """Note the engine's latest measurement: seconds of work in a chunk. Mutates: self."""
        self._latest = work_s, now_s

    def work_s(self, now_s: float) -> float | None:
        """Seconds of work in a chunk in `steps` steps; None before anything was measured.

        The latest measurement, while it is younger than `FRESH_S`. An engine that makes nothing measures nothing, so an
        older one may stem from a busy moment that has long passed: it counts only where it is below that of the start.
        """
        if self._latest is None:
            return self.start_work_s
        work_s, measured_s = self._latest
        if now_s - measured_s <= FRESH_S or self.start_work_s is None:
            return work_s
        return min(work_s, self.start_work_s)

    def share(self, fps: float, now_s: float, steps: int | None = None) -> float:
        """Share of the engine's time that a session takes which shows `fps` frames per second, in `steps` steps.

        A chunk is so many passes through the model as it has steps, and one that writes its cache.
        """
        if (work_s := self.work_s(now_s)) is None:
            return 0.0
        passes = ((steps or self.steps) + 1) / (self.steps + 1)
        return fps * work_s * passes / self.chunk_frames

    def refusal(self, others: Iterable[float], wanted: float) -> str:
        """Why a session that takes the share `wanted` cannot play beside those that take `others`; "" if it can.

        The first session that takes anything always can: if the engine is too slow for it, its video is slower, and
        says so.
        """
        taken = [share for share in others if share > 0]
        if not taken or sum(taken) + wanted <= self.limit:
            return ""
        return (
            f"The engine has no time for it: the sessions that play ({len(taken)}) take {sum(taken):.0%}, this one "
            f"would take {wanted:.0%}, and {self.limit:.0%} is the most. End one, or ask for fewer steps or frames a "
            "second."
        )

    def free_sessions(self, others: Iterable[float], wanted: float) -> int | None:
        """How many more sessions of the share `wanted` could play; None: not measured yet."""
        taken = [share for share in others if share > 0]
        if wanted <= 0:
            return None
        fit = int((self.limit - sum(taken)) / wanted + 1e-9)
        return max(fit, 0 if taken else 1)


@dataclass
class Lifetime:
    """When a session ends by itself. Times in seconds of one clock; None as a limit: none."""

    opened_s: float
    idle_limit_s: float | None = None
    limit_s: float | None = None
    idle_since_s: float | None = field(init=False)
    """Time since which it has no viewers; None while it has some."""

    def __post_init__(self) -> None:
        self.idle_since_s = self.opened_s

    def watch(self, watched: bool, now_s: float) -> None:
        """Update whether it has viewers. Mutates: self."""
        if watched:
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = now_s

    def end(self) -> tuple[float, EndReason] | None:
        """Time at which it will end by a limit unless something changes, and the reason; None: never."""
        ends: list[tuple[float, EndReason]] = []
        if self.idle_limit_s is not None and self.idle_since_s is not None:
            ends.append((self.idle_since_s + self.idle_limit_s, "idle"))
        if self.limit_s is not None:
            ends.append((self.opened_s + self.limit_s, "lifetime"))
        return min(ends, default=None)
