"""How a session starts, and the word for its end."""

from __future__ import annotations

from dataclasses import dataclass

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
