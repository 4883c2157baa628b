"""How often, and how soon, an engine that fails is started again. Pure: the caller gives the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LONGEST_WAIT_S = 30.0


@dataclass
class Restarts:
    """At most `most` restarts within `window_s` seconds. The first comes at once, the second after `wait_s`, each
    further one after twice as long, up to LONGEST_WAIT_S; what is older than the window is forgotten."""

    most: int
    window_s: float
    wait_s: float
    _at_s: deque[float] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Restarts within the window, as of the last fault."""
        return len(self._at_s)

    def fault(self, now_s: float) -> float | None:
        """The engine has failed: how long to wait before it is started again; None: not any more. Mutates: self."""
        while self._at_s and now_s - self._at_s[0] >= self.window_s:
            self._at_s.popleft()
        if len(self._at_s) >= self.most:
            return None
        self._at_s.append(now_s)
        doublings = len(self._at_s) - 2
        return 0.0 if doublings < 0 else min(self.wait_s * 2.0**doublings, LONGEST_WAIT_S)
