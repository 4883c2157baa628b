"""What bit rate suits the viewers' lines, from what they estimate. Pure: the caller gives the time.

One encoder serves all viewers of a codec, so its rate follows the median line: half of them can take it. Who is far
below the median is told so (`network: poor`) and loses pictures; it does not pull the others down.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

FLOOR = 0.4
"""The rate never falls below this share of the configured one, which is also the highest."""
SETTLE_S = 4.0
"""Between changes: each begins with a key frame, and estimates need a while to follow."""
HEADROOM = 0.85
RISE = 1.25
CLEARLY_MORE = 1.2
SMALLEST = 0.05
"""Smaller changes, as a share of the configured rate, are not made."""
FRESH_S = 10.0
"""An estimate (REMB) that is older says nothing."""
TRIAL_S = 6.0
"""A viewer's first estimates grow from a guess, whatever its line can carry."""


class BitrateController:
    """The bit rate of one encoder. Sans-IO."""

    def __init__(self, configured_bps: int) -> None:
        self._highest = configured_bps
        self._changed_s = float("-inf")
        self.rate_bps = configured_bps

    def decide(self, estimates_bps: Sequence[int], sent_bps: float, now_s: float) -> int | None:
        """The new rate in bit/s, or None to leave it.

        An estimate is bounded by what a viewer receives, and a simple picture takes fewer bits than allowed: so what
        counts is whether the line carries what is *sent*. Mutates: self.
        """
        if not estimates_bps or now_s - self._changed_s < SETTLE_S:
            return None
        line_bps = statistics.median_low(estimates_bps)
        if line_bps < sent_bps:
            wanted = min(HEADROOM * line_bps, self.rate_bps)
        elif line_bps > CLEARLY_MORE * sent_bps:
            wanted = RISE * self.rate_bps
        else:
            return None
        rate_bps = int(min(max(wanted, FLOOR * self._highest), self._highest))
        if abs(rate_bps - self.rate_bps) < SMALLEST * self._highest:
            return None
        self._changed_s = now_s
        self.rate_bps = rate_bps
        return rate_bps
