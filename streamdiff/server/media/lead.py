"""How far a stream is made ahead of what is shown: as little as the machine is steady.

What is ahead waits, and so makes everything late that a viewer asks for. It has to cover a chunk's frames, the time
that the next chunk takes, and how much that time varies. Pure: the caller measures.
"""

from __future__ import annotations

from collections import deque

MARGIN_S, MARGIN_CHUNKS = 0.08, 0.25
"""Video that is to wait when the next chunk comes, on a machine that is always equally fast: at least so long, and such
a part of a chunk."""
STEP_S = 0.005
"""The most that the lead shrinks by with every chunk."""
_BEGIN = 2 / 3  # of the limit
_WINDOW = 24  # chunks that are looked back at, of which the worst counts
_SETTLING = 3  # chunks that were on their way when the lead grew


class PlayoutLead:
    """The lead of one session.

    Its measure is the *slack*: seconds of video that still wait when a chunk's first frames come, or minus the seconds
    in which nothing did. The least slack of the last chunks is kept at a margin and half of what it varies by: below
    half of that the lead grows at once by what is missing, above it shrinks by at most STEP_S a chunk.
    """

    def __init__(self, chunk_s: float, limit_s: float) -> None:
        """Args:
        chunk_s: how long a chunk's frames are shown.
        limit_s: the most that the lead may be, of which it begins with a part; at least a chunk is always allowed.
        """
        self._chunk_s, self._limit_s = chunk_s, max(limit_s, chunk_s)
        self.lead_s = max(_BEGIN * limit_s, chunk_s)
        self._margin_s = max(MARGIN_S, MARGIN_CHUNKS * chunk_s)
        self._slacks: deque[float] = deque(maxlen=_WINDOW)
        self._settling = 0

    @property
    def spare_s(self) -> float:
        """How much the lead can still grow by."""
        return self._limit_s - self.lead_s

    def arrived(self, slack_s: float) -> None:
        """A chunk's first frames came with `slack_s` of slack. Mutates: self."""
        # An engine that needs more ahead takes it. Then the lead says nothing, and has to begin from what is there.
        self.lead_s = min(self._limit_s, max(self.lead_s, slack_s + self._chunk_s))
        self._slacks.append(slack_s)
        kept_s = self._margin_s + (max(self._slacks) - min(self._slacks)) / 2
        if self._settling:
            self._settling -= 1
        elif slack_s < kept_s / 2:
            self.lead_s = min(self._limit_s, self.lead_s + kept_s - slack_s)
            self._settling = _SETTLING
        elif len(self._slacks) == _WINDOW and (spare_s := min(self._slacks) - kept_s) > 0:
            less_s = min(spare_s, STEP_S, self.lead_s - self._chunk_s)
            self.lead_s -= less_s
            self._slacks = deque((each - less_s for each in self._slacks), _WINDOW)
