"""Load of the engine: the policy that lowers steps or frame rate of adaptive sessions above its capacity (see
`sessions.manager.EngineLoad`), and HAProxy's agent check. All but the agent check is pure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from streamdiff.errors import ConfigError

RATES = (Fraction(3, 4), Fraction(1, 2))
"""Shares of the requested frame rate that a session in the fewest steps can be lowered to."""
LATE = 1 / 8
"""A chunk has little slack if it comes when less than this share of a chunk is left to be shown. Two such in a row are
late."""
CUT = 0.85
"""After late chunks the load ceiling is set to this share of the load at that time."""
GROW = 1.25
"""Factor by which the ceiling rises after each `_hold_s` without late chunks, up to the configured limit."""
RAISED_SHARE, FULL_S = 0.9, 30.0
"""A session is raised only if the resulting load is at most `RAISED_SHARE` of the ceiling; after `FULL_S` seconds
without a change, if it is at most the ceiling."""
SETTLE_S = 2.0
"""Seconds after a change in which slack is ignored, as chunks in flight were begun before it."""
HOLD_S, LONGEST_HOLD_S = 5.0, 80.0
"""Seconds without late chunks or overload before a level is raised. Doubles, up to `LONGEST_HOLD_S`, each time that
raising made chunks late; reset to `HOLD_S` when all sessions have had their full demand for that long."""
Share = Callable[[float, int], float]
"""(frames per second, steps of a chunk) -> share of the engine's time that they take, 0 to 1."""
UNMEASURED = 10
"""Taken for a server that has not yet measured what a session costs."""


@dataclass
class Lifetime:
    """When a session ends by itself. Times in seconds of one clock; None as a limit: none."""

    opened_s: float
    idle_limit_s: float | None = None
    idle_since_s: float | None = field(init=False)
    """Time since which it has no viewers; None while it has some."""
    plays_since_s: float = field(init=False, default=math.inf)
    """Time since which its clock runs, with viewers and not paused; inf while it is held."""

    def __post_init__(self) -> None:
        self.idle_since_s = self.opened_s

    def watch(self, watched: bool, plays: bool, now_s: float) -> None:
        """Update whether it has viewers, and whether its clock runs. Mutates: self."""
        self.plays_since_s = min(self.plays_since_s, now_s) if plays else math.inf
        if watched:
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = now_s

    @property
    def ends_s(self) -> float | None:
        """Time at which it will end unless something changes; None: never."""
        if self.idle_limit_s is None or self.idle_since_s is None:
            return None
        return self.idle_since_s + self.idle_limit_s


@dataclass(frozen=True)
class ViewerDemand:
    """Steps and frame rate that a session's viewers requested. `adaptive`: whether load may reduce them; `plays`:
    whether frames are made for it now."""

    steps: int
    fps: float
    adaptive: bool
    plays: bool = True


@dataclass(frozen=True)
class LoadLimit:
    """Limit of a session under load: at most `steps` steps (None: as requested), and a share `rate` of its requested
    frame rate."""

    steps: int | None = None
    rate: Fraction = Fraction(1)

    def steps_of(self, requested: int) -> int:
        """Steps of a chunk under this limit where `requested` were requested."""
        return requested if self.steps is None else min(requested, self.steps)

    def fps_of(self, requested: float) -> float:
        """Frames per second under this limit where `requested` were requested."""
        return float(requested * self.rate)


UNLIMITED = LoadLimit()


def degradation_levels(demand: ViewerDemand, steps_known: tuple[int, ...]) -> list[LoadLimit]:
    """Limits of a session from none to the strictest: first fewer steps, then lower frame rates."""
    if not demand.adaptive:
        return [UNLIMITED]
    fewer = [LoadLimit(steps) for steps in sorted(steps_known, reverse=True) if steps < demand.steps]
    fewest = fewer[-1].steps if fewer else None
    return [UNLIMITED, *fewer, *(LoadLimit(fewest, rate) for rate in RATES)]


def least_share(demand: ViewerDemand, steps_known: tuple[int, ...], share: Share) -> float:
    """Share of the engine's time that a session takes under its strictest limit."""
    last = degradation_levels(demand, steps_known)[-1]
    return share(last.fps_of(demand.fps), last.steps_of(demand.steps))


@dataclass
class _LoadState:
    demand: ViewerDemand
    levels: list[LoadLimit]
    level: int = 0
    late: int = 0
    """Chunks in a row that had little slack."""
    calm_from_s: float = 0.0
    """Until then slack is ignored."""

    @property
    def limit(self) -> LoadLimit:
        return self.levels[self.level]

    def share(self, share: Share, level: int | None = None) -> float:
        """Its share of the engine's time at `level` (None: its current one); 0 while it does not play."""
        limit = self.limit if level is None else self.levels[level]
        return share(limit.fps_of(self.demand.fps), limit.steps_of(self.demand.steps)) if self.demand.plays else 0.0

    def tier(self, level: int) -> tuple[Fraction, int]:
        """Sort key of a level: rate, then steps. Sessions with the highest are lowered first."""
        limit = self.levels[level]
        return limit.rate, limit.steps_of(self.demand.steps)


class LoadPolicy:
    """Steps and frame rates of adaptive sessions under load, for a model that has `steps_known`.

    All sessions together may take `limit` of the engine's time, as measured. While they take more, sessions are lowered
    by one of their degradation levels each, one after the other: those with the highest rate and steps first, of equals
    the one that was opened last; no frame rate while another adaptive session has more than the fewest steps. Where
    chunks come late nevertheless, as a measured cost is an average and the machine has other work, the ceiling falls.
    Levels are raised in the opposite order when nothing was late for `HOLD_S` and the load fits with a margin.
    """

    def __init__(self, steps_known: tuple[int, ...], limit: float) -> None:
        self.steps_known, self.limit = steps_known, limit
        self._ceiling = limit
        """Share of the engine's time that all sessions may take: `limit`, or less after late chunks."""
        self._hold_s = HOLD_S
        self._changed_s, self._last_was_raise = float("-inf"), False
        """Time of the last overload or raise, and whether that was a raise."""
        self._sessions: dict[str, _LoadState] = {}

    def chunk(self, session: str, slack_s: float, chunk_s: float, now_s: float) -> None:
        """A chunk of `session`, `chunk_s` seconds of video, is finished: `slack_s` before the frames that wait would
        have run out; negative: so long after. Mutates: self."""
        state = self._sessions.get(session)
        if state is None or now_s < state.calm_from_s:
            return
        state.late = state.late + 1 if slack_s < LATE * chunk_s else 0

    def decide(self, demands: Mapping[str, ViewerDemand], share: Share, now_s: float) -> dict[str, LoadLimit]:
        """The limits that change now, by session. `demands` has all open sessions, oldest first. Mutates: self."""
        before = {name: state.limit for name, state in self._sessions.items()}
        self._update_sessions(demands, now_s)
        load = self._load(share)
        late = [state for state in self._sessions.values() if state.late >= 2]
        if late and self._candidates(lower=True):
            if load > 0:  # else what a chunk costs is not known yet
                self._ceiling = min(self._ceiling, load) * CUT
            if self._last_was_raise:
                self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S)
        if late or load > self._ceiling:
            self._lower(share, now_s)
        elif now_s - self._changed_s >= self._hold_s:
            self._raise(share, now_s)
        now = {name: state.limit for name, state in self._sessions.items()}
        return {name: limit for name, limit in now.items() if limit != before.get(name, UNLIMITED)}

    def _update_sessions(self, demands: Mapping[str, ViewerDemand], now_s: float) -> None:
        """Update the open sessions and their demands. A session whose demand has changed stays at the first level
        whose steps and rate do not exceed those of its current limit, level 0 if there is none. Mutates: self."""
        known = self._sessions
        self._sessions = {}
        for name, demand in demands.items():
            state = known.get(name)
            if state is None or state.demand != demand:
                limit = UNLIMITED if state is None else state.limit
                steps, levels = limit.steps_of(demand.steps), degradation_levels(demand, self.steps_known)
                kept = (
                    level for level, each in enumerate(levels)
                    if each.steps_of(demand.steps) <= steps and each.rate <= limit.rate
                )  # fmt: skip
                state = _LoadState(demand, levels, next(kept, 0), calm_from_s=now_s + SETTLE_S)
            self._sessions[name] = state

    def _candidates(self, *, lower: bool) -> list[_LoadState]:
        """The sessions that can be lowered, or raised, by a level; those that do not play are neither late nor a load,
        so they are not lowered."""
        return [
            state
            for state in self._sessions.values()
            if (lower and state.demand.plays and state.level + 1 < len(state.levels)) or (not lower and state.level > 0)
        ]

    def _lower(self, share: Share, now_s: float) -> None:
        """Lower at least one session, until the load is within the ceiling and no late one is in the highest tier.
        Mutates: self."""
        self._changed_s, self._last_was_raise = now_s, False
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
        """Raise the ceiling if it was lowered, and then sessions as far as the load fits. Mutates: self."""
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
            self._changed_s, self._last_was_raise = now_s, True

    def _set(self, state: _LoadState, level: int, now_s: float) -> None:
        state.level, state.late, state.calm_from_s = level, 0, now_s + SETTLE_S

    def _load(self, share: Share) -> float:
        return sum(state.share(share) for state in self._sessions.values())


@asynccontextmanager
async def serve_agent(host: str, port: int | None, free_sessions: Callable[[], int | None]) -> AsyncIterator[None]:
    """Context manager: answer at `port` (None: nowhere). `free_sessions` says how many more sessions could play;
    None: it is not known.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"up {weight(free_sessions())}%\n".encode())
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise ConfigError(f"serve.agent_port: {port} cannot be had on {host}: {error.strerror}") from error
    async with server:
        yield


def weight(free_sessions: int | None) -> int:
    """The share of its weight that the server should have for new sessions, 0 to 100.

    It never says `drain`: that would undo, with the `ready` that ends it, what an operator has set at the balancer.
    """
    return UNMEASURED if free_sessions is None else min(free_sessions, 100)
