"""What a session is opened with, and when an unwatched or expired one ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamdiff.errors import StreamdiffError


class SessionEnded(StreamdiffError):
    """The session ended while somebody waited for it."""


@dataclass(frozen=True)
class SessionSpec:
    """How a session starts; None means the engine's default. `fps`: frames shown per second."""

    prompt: str
    seed: int
    fps: float
    steps: int | None = None
    kv_context: str | None = None


Reason = Literal["idle", "lifetime"]


@dataclass
class Lifetime:
    """Times in seconds of one clock; None as a limit: none."""

    opened_s: float
    idle_limit_s: float | None
    limit_s: float | None
    idle_since_s: float | None = field(init=False)
    """Since when nobody watches; None while somebody does."""

    def __post_init__(self) -> None:
        self.idle_since_s = self.opened_s

    def watch(self, watched: bool, now_s: float) -> None:
        """Say whether somebody watches now. Mutates: self."""
        if watched:
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = now_s

    def end(self) -> tuple[float, Reason] | None:
        """When it ends as things are, and why; None: never."""
        ends: list[tuple[float, Reason]] = []
        if self.idle_limit_s is not None and self.idle_since_s is not None:
            ends.append((self.idle_since_s + self.idle_limit_s, "idle"))
        if self.limit_s is not None:
            ends.append((self.opened_s + self.limit_s, "lifetime"))
        return min(ends, default=None)
