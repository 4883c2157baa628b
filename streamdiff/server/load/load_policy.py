"""What adaptive sessions give up while there is too much to do, and when they get it back. Pure: no clock, no I/O.

Events in (`chunk`: how much slack a finished chunk had), decisions out (`decide`: what holds for whom from now on). The
same object runs in the server and, under virtual time with the real scheduler, in `benchmarks/simulated_load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

RATES = (Fraction(3, 4), Fraction(1, 2))
"""Shares of the frame rate that was asked for, which a session in the fewest steps can be lowered to."""
LATE = 1 / 8
"""A chunk has little slack if it comes when less than this share of a chunk is left to be shown. Two such in a row are
late."""
CUT = 0.85
"""After late chunks the sessions may ask for this share of what they asked for when that happened."""
GROW = 1.25
"""How much more they may ask for after each calm `_hold_s`, until it is the limit again."""
RAISED_SHARE, FULL_S = 0.9, 30.0
"""What was given up comes back only where the sessions then ask for no more than this share of what they may; for all
of it after so many calm seconds."""
SETTLE_S = 2.0
"""After a change slack is not looked at: chunks in flight are still the old ones."""
HOLD_S, LONGEST_HOLD_S = 5.0, 80.0
"""How long nothing may have been late, or too much, before something comes back. Twice as long after each time that
this made chunks late; as at first, when all have had what they asked for that long."""


@dataclass(frozen=True)
class Asked:
    """What a session's viewers asked for, and whether frames are made for it now."""

    steps: int
    fps: float
    adaptive: bool
    plays: bool = True


@dataclass(frozen=True)
class LoadLimit:
    """What load leaves a session: at most so many steps (None: all it asked for), a share `rate` of its frame rate."""

    steps: int | None = None
    rate: Fraction = Fraction(1)

    def steps_of(self, asked: int) -> int:
        """Steps of a chunk where `asked` were asked for."""
        return asked if self.steps is None else min(asked, self.steps)

    def fps_of(self, asked: float) -> float:
        """Frames per second where `asked` were asked for."""
        return float(asked * self.rate)


UNLIMITED = LoadLimit()
Share = Callable[[float, int], float]
"""The share of the engine's time that so many frames per second take, made in so many steps."""


def ladder(asked: Asked, steps_known: tuple[int, ...]) -> list[LoadLimit]:
    """What a session can be limited to, from nothing given up to everything: first its steps, then its frame rate."""
    if not asked.adaptive:
        return [UNLIMITED]
    fewer = [LoadLimit(steps) for steps in sorted(steps_known, reverse=True) if steps < asked.steps]
    fewest = fewer[-1].steps if fewer else None
    return [UNLIMITED, *fewer, *(LoadLimit(fewest, rate) for rate in RATES)]


def least_share(asked: Asked, steps_known: tuple[int, ...], share: Share) -> float:
    """What a session takes of the engine's time when it has given up all that it can."""
    last = ladder(asked, steps_known)[-1]
    return share(last.fps_of(asked.fps), last.steps_of(asked.steps))


@dataclass
class _Session:
    asked: Asked
    ladder: list[LoadLimit]
    level: int = 0
    late: int = 0
    """Chunks in a row that had little slack."""
    calm_from_s: float = 0.0
    """Until then slack is not looked at."""

    @property
    def limit(self) -> LoadLimit:
        return self.ladder[self.level]

    def share(self, share: Share, level: int | None = None) -> float:
        """What it takes of the engine's time, at another level where one is given."""
        limit = self.limit if level is None else self.ladder[level]
        return share(limit.fps_of(self.asked.fps), limit.steps_of(self.asked.steps)) if self.asked.plays else 0.0

    def tier(self, level: int) -> tuple[Fraction, int]:
        """How much of it is left at a level; sessions with more give first. Frame rates weigh more than steps."""
        limit = self.ladder[level]
        return limit.rate, limit.steps_of(self.asked.steps)


@dataclass
class LoadPolicy:
    """Steps and frame rates of adaptive sessions under load, for a model that has `steps_known`.

    All together may ask for `limit` of the engine's time, as measured. Where they ask for more, sessions give up a step
    of their ladder, one after the other, until they do not: those with the most left first, of equals the one that was
    opened last; no one's frame rate while another adaptive one has more than the fewest steps. Where chunks come late
    all the same, as a measured cost is an average and a machine has other work, they may ask for less. It comes back in
    the opposite order when nothing was late for `HOLD_S` and it fits with room to spare.
    """

    steps_known: tuple[int, ...]
    limit: float
    _ceiling: float = field(init=False)
    """What the sessions may ask for: `limit`, or less after late chunks."""
    _hold_s: float = field(default_factory=lambda: HOLD_S, init=False)
    _changed_s: float = field(default=float("-inf"), init=False)
    """When there was too much to do last, or something came back."""
    _came_back: bool = field(default=False, init=False)
    """Whether the latest change gave something back."""
    _sessions: dict[str, _Session] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._ceiling = self.limit

    def chunk(self, session: str, slack_s: float, chunk_s: float, now_s: float) -> None:
        """A chunk of `session`, `chunk_s` seconds of video, is finished: `slack_s` before the frames that wait would
        have run out; negative: so long after. Mutates: self."""
        state = self._sessions.get(session)
        if state is None or now_s < state.calm_from_s:
            return
        state.late = state.late + 1 if slack_s < LATE * chunk_s else 0

    def decide(self, asked: Mapping[str, Asked], share: Share, now_s: float) -> dict[str, LoadLimit]:
        """The limits that change now, by session. `asked` has all open sessions, oldest first. Mutates: self."""
        before = {name: state.limit for name, state in self._sessions.items()}
        self._take(asked, now_s)
        load = sum(state.share(share) for state in self._sessions.values())
        late = [state for state in self._sessions.values() if state.late >= 2]
        if late and self._candidates(lower=True):
            if load > 0:  # else what a chunk costs is not known yet
                self._ceiling = min(self._ceiling, load) * CUT
            if self._came_back:
                self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S)
        if late or load > self._ceiling:
            self._lower(share, now_s)
        elif now_s - self._changed_s >= self._hold_s:
            self._raise(share, now_s)
        now = {name: state.limit for name, state in self._sessions.items()}
        return {name: limit for name, limit in now.items() if limit != before.get(name, UNLIMITED)}

    def _take(self, asked: Mapping[str, Asked], now_s: float) -> None:
        """Note who is open and what they ask for; a session whose wish has changed keeps what it has given up, as far
        as that is still less than its wish. Mutates: self."""
        known = self._sessions
        self._sessions = {}
        for name, wish in asked.items():
            state = known.get(name)
            if state is None:
                state = _Session(wish, ladder(wish, self.steps_known), calm_from_s=now_s + SETTLE_S)
            elif state.asked != wish:
                steps, rate = state.limit.steps_of(wish.steps), state.limit.rate
                rungs = ladder(wish, self.steps_known)
                kept = (
                    level for level, rung in enumerate(rungs)
                    if rung.steps_of(wish.steps) <= steps and rung.rate <= rate
                )  # fmt: skip
                state = _Session(wish, rungs, next(kept, 0), calm_from_s=now_s + SETTLE_S)
            self._sessions[name] = state

    def _candidates(self, *, lower: bool) -> list[_Session]:
        """The sessions that can be lowered, or raised, by a level; those that do not play are neither late nor a load,
        so they are not lowered."""
        return [
            state
            for state in self._sessions.values()
            if (lower and state.asked.plays and state.level + 1 < len(state.ladder)) or (not lower and state.level > 0)
        ]

    def _lower(self, share: Share, now_s: float) -> None:
        """Lower sessions until they ask for no more than they may, and of those with the most left all that are late;
        in any case one. Mutates: self."""
        self._changed_s, self._came_back = now_s, False
        lowered = False
        while can := self._candidates(lower=True):
            most = max(state.tier(state.level) for state in can)
            with_most = [state for state in can if state.tier(state.level) == most]
            late = [state for state in with_most if state.late >= 2]
            if lowered and not late and self._load(share) <= self._ceiling:
                break
            state = (late or with_most)[-1]
            self._set(state, state.level + 1, now_s)
            lowered = True
        for state in self._sessions.values():  # a chunk in flight is as it was begun
            state.late, state.calm_from_s = 0, now_s + SETTLE_S

    def _raise(self, share: Share, now_s: float) -> None:
        """Give back what fits. Mutates: self."""
        if self._ceiling < self.limit:
            self._ceiling, self._changed_s = min(self.limit, self._ceiling * GROW), now_s
        elif not self._candidates(lower=False):
            self._hold_s = HOLD_S
        allowed = RAISED_SHARE if now_s - self._changed_s < FULL_S else 1.0
        while can := self._candidates(lower=False):
            least = min(state.tier(state.level - 1) for state in can)
            first = next(state for state in can if state.tier(state.level - 1) == least)
            others = self._load(share) - first.share(share)
            if others + first.share(share, first.level - 1) > allowed * self._ceiling:
                return
            self._set(first, first.level - 1, now_s)
            self._changed_s, self._came_back = now_s, True

    def _set(self, state: _Session, level: int, now_s: float) -> None:
        state.level, state.late, state.calm_from_s = level, 0, now_s + SETTLE_S

    def _load(self, share: Share) -> float:
        return sum(state.share(share) for state in self._sessions.values())
