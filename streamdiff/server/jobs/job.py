"""Video jobs: request, status and times. Independent of HTTP, SQLite and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamdiff.engine.messages import DEFAULT_STRENGTH

Status = Literal["queued", "in_progress", "completed", "failed"]
ENDED: tuple[Status, ...] = ("completed", "failed")
ATTEMPTS = 3
"""After so many that ended with the engine, the server or the disk's last room a job is taken to be the reason."""


@dataclass(frozen=True)
class VideoRequest:
    """Parameters of a video. `frames` at `fps` per second, of `width` x `height` pixels. `image`: whether it begins
    with the picture that the store keeps with it; `features`: names of the feature files there, see `Features`."""

    model: str
    prompt: str
    seed: int
    steps: int
    frames: int
    fps: float
    width: int
    height: int
    image: bool = False
    features: tuple[str, ...] = ()
    strength: float = DEFAULT_STRENGTH


@dataclass(frozen=True)
class Job:
    """A request and where it stands. Times are in seconds since the Unix epoch; None: not yet.

    `attempts`: how often it was begun and did not end, the current time included. `error` says why it failed.
    `inference_s`: seconds from the opening of its session to its last frame; `peak_memory_mb`: MiB of the engine
    meanwhile, at most.
    """

    id: str
    request: VideoRequest
    status: Status
    created_s: float
    attempts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    expires_s: float | None = None
    error: str = ""
    inference_s: float | None = None
    peak_memory_mb: float | None = None
