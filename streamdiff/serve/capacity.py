"""How many sessions an engine can play, from what a chunk costs and how fast frames are shown. Pure.

Memory is the engine's own affair: it refuses a session whose caches do not fit, see `pipeline/planning/budget.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Capacity:
    """`work_s`: seconds of work in a chunk of `chunk_frames` frames in `steps` steps, as measured; None: not yet.

    `limit`: share of the engine's time that all sessions may ask for together.
    """

    chunk_frames: int
    steps: int
    limit: float
    work_s: float | None = None

    def share(self, fps: float, steps: int | None = None) -> float:
        """Share of the engine's time that a session takes which shows `fps` frames per second, in `steps` steps.

        A chunk is so many passes through the model as it has steps, and one that writes its cache.
        """
        if self.work_s is None:
            return 0.0
        passes = ((steps or self.steps) + 1) / (self.steps + 1)
        return fps * self.work_s * passes / self.chunk_frames

    def refusal(self, others: Iterable[float], wanted: float) -> str:
        """Why a session that takes the share `wanted` cannot play beside those that take `others`; "" if it can.

        The first session always can: if the engine is too slow for it, its video is slower, and says so.
        """
        taken = list(others)
        if not taken or sum(taken) + wanted <= self.limit:
            return ""
        return (
            f"The engine has no time for it: the open sessions ({len(taken)}) take {sum(taken):.0%}, this one would "
            f"take {wanted:.0%}, and {self.limit:.0%} is the most. End one, or ask for fewer steps or frames a second."
        )

    def room(self, others: Iterable[float], wanted: float) -> int | None:
        """How many more sessions of the share `wanted` could play; None: not measured yet."""
        taken = list(others)
        if self.work_s is None or wanted <= 0:
            return None
        fit = int((self.limit - sum(taken)) / wanted + 1e-9)
        return max(fit, 0 if taken else 1)
