"""The only module that reads the clock; everyone else is given the time."""

from __future__ import annotations

import time


def monotonic_s() -> float:
    """Seconds on a clock that never goes back; its zero means nothing."""
    return time.monotonic()


def wall_s() -> float:
    """Seconds since the Unix epoch, for dates in files and logs."""
    return time.time()
