"""Compute share of each open session, spare capacity, and load limits for adaptive sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import FrameBatch, Measured, Ready
from streamdiff.errors import EngineFailure
from streamdiff.server.load.capacity import Capacity
from streamdiff.server.load.load_policy import LoadPolicy, SessionDemand, least_share
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.sessions.live_session import LiveSession

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_ENCODERS = ("text", "picture", "video")
"""As `Measured.encodings` has them."""


class EngineLoad:
    """`occupancy` is the share of the time that each rank was at work, as the engine reported last, and `batching` its
    forwards by rows, and those of one row by the reason, since it began."""

    def __init__(
        self, config: Config, ready: Ready, metrics: Metrics, sessions: Callable[[], Sequence[LiveSession]]
    ) -> None:
        """`sessions` are the open ones, oldest first."""
        self.capacity = Capacity(ready.chunk_frames, ready.steps, config.serve.max_utilization, ready.work_s)
        self.occupancy: tuple[float, ...] = ()
        self.batching: dict[str, dict[str, int]] = {"rows": {}, "alone": {}}
        self._policy = LoadPolicy(ready.steps_known, config.serve.max_utilization)
        self._config, self._ready, self._metrics, self._sessions = config, ready, metrics, sessions
        self._totals: defaultdict[tuple[Counter, str], CounterDelta] = defaultdict(CounterDelta)  # by label
        self._changed = asyncio.Event()

    # ---- what there is ------------------------------------------------------------------------------------------

    def free_sessions(self) -> int | None:
        """How many more sessions of the default kind could play, with all that adaptive ones can give up; None: not
        measured yet."""
        free = self.capacity.free_sessions(self._least_shares(), self._default_share())
        by_memory, away, sessions = self._ready.sessions_fit, self._ready.sessions_away, self._sessions()
        if free is None or by_memory is None:
            return free
        most = by_memory - sum(not session.idle for session in sessions)
        if away is not None:
            most = min(most, by_memory + away - len(sessions))
        return max(0, min(free, most))

    def sessions_limit(self) -> int | None:
        """How many sessions of the default kind can play at once; None: not measured yet."""
        by_time, by_memory = self.capacity.free_sessions((), self._default_share()), self._ready.sessions_fit
        return by_time if by_time is None or by_memory is None else min(by_time, by_memory)

    def _default_share(self) -> float:
        default = SessionDemand(self._ready.steps, self._config.playback.fps, self._config.serve.adaptive)
        return self._least_share(default)

    def share(self, fps: float, steps: int | None = None) -> float:
        """The share of the engine's time, 0 to 1, that a session takes while it plays."""
        return self.capacity.share(fps, clock.monotonic_s(), steps)

    def shares(self) -> list[float]:
        """The share of the engine's time that each session takes; 0 for one that does not play."""
        now_s = clock.monotonic_s()
        return [self.share(each.fps, each.steps) if each.plays(now_s) else 0.0 for each in self._sessions()]

    def refusal(self, demand: SessionDemand, excluding: str | None = None) -> str:
        """Why a session of this demand cannot play beside all others but `excluding`, with adaptive ones at their
        strictest limit; "" if it can."""
        return self.capacity.refusal(self._least_shares(excluding), self._least_share(demand))

    def _least_shares(self, excluding: str | None = None) -> list[float]:
        """The share of each session but `excluding` at its strictest limit; 0 for one that does not play."""
        now_s = clock.monotonic_s()
        others = [session.demand(now_s) for session in self._sessions() if session.id != excluding]
        return [self._least_share(demand) if demand.plays else 0.0 for demand in others]

    def _least_share(self, demand: SessionDemand) -> float:
        return least_share(demand, self._ready.steps_known, self.share)

    # ---- news ---------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """A session was opened, or its demand has changed. Mutates: self."""
        self._changed.set()

    def restart(self, ready: Ready) -> None:
        """The engine was restarted. Mutates: self."""
        self._ready = ready
        self.capacity.restart(ready.work_s)

    def chunk(self, session: LiveSession, batch: FrameBatch) -> None:
        """Measure a session's slack by new frames, before they are pushed. Mutates: self."""
        if (slack_s := session.playback.slack_s(batch)) is not None:
            chunk_s = self._ready.chunk_frames / session.fps
            self._policy.chunk(session.id, slack_s, chunk_s, clock.monotonic_s())

    def measured(self, measured: Measured) -> None:
        """Take a `Measured` event of the engine. Mutates: self, the metrics."""
        self.capacity.measured(measured.work_s, clock.monotonic_s())
        self._changed.set()
        self.occupancy = measured.occupancy
        for stage, total_s in enumerate(measured.busy_s):
            self._count(self._metrics.stage_busy_s, str(stage), total_s)
        self.batching = {
            "rows": {str(rows): count for rows, count in enumerate(measured.forwards, 1) if count},
            "alone": dict(zip(measured.alone, measured.alone_forwards, strict=True)),
        }
        for encoder, total in zip(_ENCODERS, measured.encodings, strict=True):
            self._count(self._metrics.encodings, encoder, total)
        for rows, count in enumerate(measured.forwards, 1):
            self._count(self._metrics.forwards, str(rows), count)
        for reason, count in self.batching["alone"].items():
            self._count(self._metrics.alone, reason, count)

    def _count(self, counter: Counter, label: str, total: float) -> None:
        counter.labels(label).inc(self._totals[counter, label].increase(total))

    # ---- load limits --------------------------------------------------------------------------------------------

    async def follow(self, running: Callable[[], bool]) -> None:
        """Update the load limits of adaptive sessions at every change and every second while the engine is `running`;
        until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            if running():
                await self._limit_sessions()

    async def _limit_sessions(self) -> None:
        now_s = clock.monotonic_s()
        sessions = {each.id: each for each in self._sessions()}
        demands = {id: each.demand(now_s) for id, each in sessions.items()}
        for id, limit in self._policy.decide(demands, self.share, now_s).items():
            session, steps, fps = sessions[id], limit.steps_of(demands[id].steps), limit.fps_of(demands[id].fps)
            if session.closed:
                continue
            down = steps < session.steps or fps < session.fps
            self._metrics.load_changes.labels("down" if down else "up").inc()
            fields = log_fields(session=id, steps=steps, fps=fps)
            logger.info("By load, session %s has %d steps, %g frames/s.", id, steps, fps, extra=fields)
            with contextlib.suppress(EngineFailure):  # what reads its events says so
                await session.limit_to(limit)
