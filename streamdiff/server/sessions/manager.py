"""Opens, limits and ends the sessions of one server, and dispatches the engine's events to them.

Knows nothing about HTTP or WebRTC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import Counter

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine import messages
from streamdiff.engine.messages import Data, Event, FrameBatch, LoadFigures, Ready, Refused
from streamdiff.engine.process.supervisor import EngineSupervisor, Restarting
from streamdiff.errors import NOT_FINITE, ConfigError, EngineFailure, RequestError
from streamdiff.server.auth import Tokens
from streamdiff.server.load import Lifetime, LoadPolicy, ViewerDemand, least_share
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.problem import Problem, Unavailable
from streamdiff.server.sessions.control import EngineStatus, StrengthMessage
from streamdiff.server.sessions.keeper import SnapshotKeeper, read_snapshot, spec_of
from streamdiff.server.sessions.live_session import OPENING, LiveSession, StreamSpec
from streamdiff.server.sessions.video_input import VideoInput, play
from streamdiff.server.sessions.wheel import BlockedWords
from streamdiff.server.tasks import end_tasks, wait_at_most
from streamdiff.snapshot_header import read_saved_session
from streamdiff.video.picture import fit_picture

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_ENCODERS = ("text", "picture", "video")
"""As `LoadFigures.encodings` has them."""
DEFAULT_SESSION = "default"
FRESH_S = 30.0
"""How long a measurement says how busy the machine is."""
OPEN_TIMEOUT_S = 60.0
INPUT_ANSWER_S = 5.0
"""How long the engine is waited for to take an input; a large encoder may be loaded later than that."""
ENDED_RETRY_S = 5
LONGEST_RETRY_S, SHORTEST_RETRY_S = 60.0, 1.0
HOUSEKEEPING_S = 1.0
MEMORY_RETRY_S = 2.0
"""How long a session that waits for memory is not asked for again."""
RESERVED_S = 30.0
"""How long a new session keeps its share of the engine's time before anybody watches."""
REMEMBERED = 1024
"""Ended sessions whose reason is remembered."""


class EngineLoad:
    """What sessions take of an engine's time, and what more of them could have. Memory is not counted here: the engine
    refuses a session whose caches do not fit, see `pipeline/planner/kv_budget.py`.

    `limit`: share of the engine's time that all sessions may ask for together. `occupancy` is the share of the time
    that each rank was at work, as the engine reported last, and `batching` its forwards by rows, and those of one row
    by the reason, since it began.
    """

    def __init__(
        self, config: Config, ready: Ready, metrics: Metrics, sessions: Callable[[], Sequence[LiveSession]]
    ) -> None:
        """`sessions` are the open ones, oldest first."""
        self.limit = config.serve.max_utilization
        self.occupancy: tuple[float, ...] = ()
        self.batching: dict[str, dict[str, int]] = {"rows": {}, "alone": {}}
        self._start_work_s = ready.chunk_compute_s  # as measured while the engine started; None: it was not
        self._latest: tuple[float, float] | None = None  # seconds of work in a chunk, and when that was measured
        self._policy = LoadPolicy(ready.steps_known, self.limit)
        self._default = ViewerDemand(ready.steps, config.playback.fps, config.serve.adaptive)
        self._ready, self._metrics, self._sessions = ready, metrics, sessions
        self._totals: defaultdict[tuple[Counter, str], CounterDelta] = defaultdict(CounterDelta)  # by label
        self._changed = asyncio.Event()

    # ---- what there is ------------------------------------------------------------------------------------------

    @property
    def work_s(self) -> float | None:
        """Seconds of work in a chunk in the default number of steps; None before anything was measured.

        The latest measurement, while it is younger than `FRESH_S`. An engine that makes nothing measures nothing, so an
        older one may stem from a busy moment that has long passed: it counts only where it is below that of the start.
        """
        if self._latest is None:
            return self._start_work_s
        work_s, measured_s = self._latest
        if clock.monotonic_s() - measured_s <= FRESH_S or self._start_work_s is None:
            return work_s
        return min(work_s, self._start_work_s)

    def share(self, fps: float, steps: int | None = None) -> float:
        """Share of the engine's time, 0 to 1, that a session takes which shows `fps` frames per second, in `steps`
        steps. A chunk is so many passes through the model as it has steps, and one that writes its cache."""
        if (work_s := self.work_s) is None:
            return 0.0
        passes = ((steps or self._ready.steps) + 1) / (self._ready.steps + 1)
        return fps * work_s * passes / self._ready.chunk_frames

    def shares(self) -> list[float]:
        """The share of the engine's time that each session takes; 0 for one that does not play."""
        now_s = clock.monotonic_s()
        return [self.share(each.fps, each.steps) if each.plays(now_s) else 0.0 for each in self._sessions()]

    def free_sessions(self) -> int | None:
        """How many more sessions of the default kind could play, with all that adaptive ones can give up; None: not
        measured yet."""
        free = self._fit(self._least_shares())
        by_memory, away, sessions = self._ready.max_sessions, self._ready.max_swapped_sessions, self._sessions()
        if free is None or by_memory is None:
            return free
        most = by_memory - sum(not session.idle for session in sessions)
        if away is not None:
            most = min(most, by_memory + away - len(sessions))
        return max(0, min(free, most))

    def sessions_limit(self) -> int | None:
        """How many sessions of the default kind can play at once; None: not measured yet."""
        by_time, by_memory = self._fit([]), self._ready.max_sessions
        return by_time if by_time is None or by_memory is None else min(by_time, by_memory)

    def refusal(self, demand: ViewerDemand, excluding: str | None = None) -> str:
        """Why a session of this demand cannot play beside all others but `excluding`, with adaptive ones at their
        strictest limit; "" if it can.

        The first session that takes anything always can: if the engine is too slow for it, its video is slower, and
        says so.
        """
        taken, wanted = self._least_shares(excluding), self._least_share(demand)
        if not taken or sum(taken) + wanted <= self.limit:
            return ""
        return (
            f"The engine has no time for it: the sessions that play ({len(taken)}) take {sum(taken):.0%}, this one "
            f"would take {wanted:.0%}, and {self.limit:.0%} is the most. End one, or ask for fewer steps or frames a "
            "second."
        )

    def _fit(self, taken: Sequence[float]) -> int | None:
        """How many sessions of the default kind have time beside those that take `taken`; None: not measured yet."""
        if (wanted := self._least_share(self._default)) <= 0:
            return None
        return max(int((self.limit - sum(taken)) / wanted + 1e-9), 0 if taken else 1)

    def _least_shares(self, excluding: str | None = None) -> list[float]:
        """What each session that takes anything, but `excluding`, takes at its strictest limit."""
        now_s = clock.monotonic_s()
        others = [session.demand(now_s) for session in self._sessions() if session.id != excluding]
        return [share for demand in others if demand.plays and (share := self._least_share(demand)) > 0]

    def _least_share(self, demand: ViewerDemand) -> float:
        return least_share(demand, self._ready.steps_known, self.share)

    # ---- news ---------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """A session was opened, or its demand has changed. Mutates: self."""
        self._changed.set()

    def restart(self, ready: Ready) -> None:
        """The engine was restarted. Mutates: self."""
        self._ready = ready
        if ready.chunk_compute_s is not None:
            self._start_work_s, self._latest = ready.chunk_compute_s, None

    def chunk(self, session: LiveSession, batch: FrameBatch) -> None:
        """Measure a session's slack by new frames, before they are pushed. Mutates: self."""
        if (slack_s := session.playback.slack_s(batch)) is not None:
            chunk_s = self._ready.chunk_frames / session.fps
            self._policy.chunk(session.id, slack_s, chunk_s, clock.monotonic_s())

    def measured(self, measured: LoadFigures) -> None:
        """Take a `LoadFigures` event of the engine. Mutates: self, the metrics."""
        self._latest = measured.chunk_compute_s, clock.monotonic_s()
        self._changed.set()
        self.occupancy = measured.occupancy
        alone = dict(zip(measured.alone, measured.alone_forwards, strict=True))
        rows = {str(rows): count for rows, count in enumerate(measured.forwards, 1)}
        self.batching = {"rows": {name: count for name, count in rows.items() if count}, "alone": alone}
        for counter, totals in (
            (self._metrics.stage_busy_s, {str(stage): busy_s for stage, busy_s in enumerate(measured.busy_s)}),
            (self._metrics.encodings, dict(zip(_ENCODERS, measured.encodings, strict=True))),
            (self._metrics.forwards, rows),
            (self._metrics.alone, alone),
        ):
            for label, total in totals.items():
                counter.labels(label).inc(self._totals[counter, label].increase(total))

    # ---- load limits --------------------------------------------------------------------------------------------

    async def follow(self, running: Callable[[], bool]) -> None:
        """Update the load limits of adaptive sessions at every change and every second while the engine is `running`;
        until cancelled."""
        while True:
            await wait_at_most(self._changed, _LOOK_S)
            self._changed.clear()
            if not running():
                continue
            now_s = clock.monotonic_s()
            sessions = {each.id: each for each in self._sessions()}
            demands = {id: each.demand(now_s) for id, each in sessions.items()}
            for id, limit in self._policy.decide(demands, self.share, now_s).items():
                session, steps, fps = sessions[id], limit.steps_of(demands[id].steps), limit.fps_of(demands[id].fps)
                if session.closed:
                    continue
                down = steps < session.steps or fps < session.fps
                self._metrics.load_changes.labels("down" if down else "up").inc()
                told = "By load, session %(session)s has %(steps)d steps, %(fps)g frames/s."
                logger.info(told, {"session": id, "steps": steps, "fps": fps})
                with contextlib.suppress(EngineFailure):  # what reads its events says so
                    await session.limit_to(limit)


class Manager:
    """The open sessions. While `draining` no session is opened; `ended` is set when the engine has ended for good."""

    def __init__(self, config: Config, connection: EngineSupervisor, metrics: Metrics, keeper: SnapshotKeeper) -> None:
        """The sessions that `keeper` has found of a server before this one are resumed."""
        self.ready = ready = connection.ready
        self.engine = EngineStatus()
        self.draining = False
        self.ended = asyncio.Event()
        self.on_end: Callable[[LiveSession], Awaitable[None]] | None = None
        """Called when a session ends, before its threads do: closes the connections of its viewers."""
        self.on_event: Callable[[Event | Restarting], None] = lambda event: None
        """Called with every event of the engine, after the sessions have handled it."""
        self.make_room: Callable[[], Awaitable[bool]] | None = None
        """Frees memory for a new session by preempting video jobs; returns whether any ran."""
        self.load = EngineLoad(config, ready, metrics, lambda: self.sessions)
        self._config, self._connection, self._metrics = config, connection, metrics
        self._prefix = "s-" if config.serve.name is None else f"s-{config.serve.name}-"
        self._sessions: dict[str, LiveSession] = {}
        self._end_reasons: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.keeper, self.words = keeper, BlockedWords(config.serve)
        self.reopening: dict[str, Data | None] = {}
        """Sessions that a new engine was asked for and has not answered, and what `keeper.snapshot` gave of each."""
        start = config.session
        image = None if start.image is None else fit_picture(start.image, ready.width, ready.height)[None]
        spec = StreamSpec(start.prompt, start.seed, config.playback.fps, image=image, adaptive=config.serve.adaptive)
        self._begin_with = None if start.snapshot is None else read_snapshot(start.snapshot)
        if any(each.record.id == DEFAULT_SESSION for each in keeper.found):
            self._begin_with = None
        elif self._begin_with is None:
            if image is not None or not ready.begins_with_picture:  # else viewers open sessions, with their pictures
                self._add(DEFAULT_SESSION, spec)
        else:
            saved = read_saved_session(self._begin_with, str(start.snapshot))
            spec = spec.resumed(saved, start.prompt if "prompt" in start.model_fields_set else None)
            self._add(DEFAULT_SESSION, spec).playback.resume_at(saved.made_frames)
        for each in sorted(keeper.found, key=lambda each: each.record.id != DEFAULT_SESSION):
            session = self._add(each.record.id, spec_of(each.record, ready))
            session.reserved_until_s = clock.monotonic_s() + RESERVED_S
            self.keeper.take_up(each, session, config.serve)

    # ---- what there is ------------------------------------------------------------------------------------------

    def get(self, id: str) -> LiveSession | None:
        """An open session, or None if there is none of that name."""
        return self._sessions.get(id)

    @property
    def sessions(self) -> list[LiveSession]:
        """All sessions, in the order of their opening."""
        return list(self._sessions.values())

    @property
    def waiting(self) -> list[LiveSession]:
        """Sessions of before for which the engine has had no memory yet."""
        return [session for session in self.sessions if session.engine.state == "waiting"]

    def end_reason(self, id: str) -> str | None:
        """Why a session of that name ended; None if there never was one, or long ago."""
        if id in self._sessions:
            return None
        # With a name of its own, a server knows an id that it gave out before it was started again.
        is_own = self._config.serve.name is not None and id.startswith(self._prefix)
        return self._end_reasons.get(id, "restart" if is_own else None)

    def refuse_viewer(self, session: LiveSession) -> str:
        """Why a session that is not on the device cannot come there to be watched now, or "" if it can."""
        fit, others = self.ready.max_sessions, [each for each in self.sessions if each is not session]
        if session.place == "device" or fit is None or sum(not each.idle for each in others) < fit:
            return ""
        return (
            f"The session is not on the device, as nobody watched it, and the {fit} that fit there are watched. Come "
            "again when one of them is not."
        )

    def free_sessions(self) -> int | None:
        """How many more sessions could be opened and play; None: no session was measured yet."""
        return 0 if self.draining or not self.engine.running else self.load.free_sessions()

    def sessions_limit(self) -> int | None:
        """How many sessions of the default kind can play at once, now 0 if none is opened; None: not measured yet."""
        return 0 if self.draining or not self.engine.running else self.load.sessions_limit()

    def sessions_by_location(self) -> dict[str, int]:
        """Number of open sessions by location of their caches: `device`, `host` and `disk`."""
        return {where: sum(each.place == where for each in self.sessions) for where in ("device", "host", "disk")}

    # ---- open and end -------------------------------------------------------------------------------------------

    async def open(self, spec: StreamSpec, snapshot: Data | None = None, **more: Any) -> LiveSession:
        """Open a session, which resumes from the file `snapshot`, if there is one; `more` are fields of
        `messages.Open`: it is a branch, or plays a log.

        Raises:
            Unavailable: no time, no memory, the server is about to end, or the engine does not run.
            RequestError: a field that the engine never takes; names it.
        """
        if not self.engine.running:
            raise self.engine.unavailable()
        if self.draining:
            raise Unavailable("draining", "The server is about to end and opens no more sessions.", 5)
        steps = self.ready.steps if spec.steps is None else spec.steps
        if (no_time := self._no_time(ViewerDemand(steps, spec.fps, spec.adaptive))) is not None:
            raise no_time
        # Nothing is awaited between the look at the shares and this, which takes one.
        session = self._add(f"{self._prefix}{secrets.token_urlsafe(9)}", spec)
        serve, now_s = self._config.serve, clock.monotonic_s()
        session.lifetime = Lifetime(now_s, serve.idle_s)
        session.reserved_until_s = now_s + RESERVED_S
        self.load.changed()
        session.tokens = Tokens.fresh()
        try:
            await self._open_on_engine(session, snapshot, more)
        except BaseException as error:
            if not session.closed:
                await self._drop(session)
            if not isinstance(error, RequestError):
                await self._close(session.id)  # it may open yet
            if isinstance(error, RequestError) and error.code == "memory":
                raise Unavailable("memory", str(error), self.retry_after_s()) from error
            if isinstance(error, TimeoutError | EngineFailure):
                raise Unavailable("engine", "The engine did not open the session.", ENDED_RETRY_S) from error
            raise
        session.show_timeline(more.get("changes", ()), 0)
        fields = {name: getattr(session, name) for name in ("fps", "steps", "seed")}
        logger.info("Session %(session)s was opened.", {"session": session.id, **fields})
        return session

    async def _open_on_engine(self, session: LiveSession, snapshot: Data | None, more: dict[str, Any]) -> None:
        """Open a session on the engine, if memory is short once more after `make_room`. Mutates: session."""
        if snapshot is not None:
            session.playback.resume_at((await asyncio.to_thread(read_saved_session, snapshot)).made_frames)
        try:
            await session.ask_open(snapshot, **more)
            await session.wait_opened(OPEN_TIMEOUT_S)
        except RequestError as error:
            if error.code != "memory" or self.make_room is None or not await self.make_room():
                raise
            await session.ask_open(snapshot, **more)
            await session.wait_opened(OPEN_TIMEOUT_S)
        if snapshot is not None:  # which may have been paused
            await session.send_paused()

    async def end(self, id: str, reason: str, why: str = "") -> None:
        """End a session and disconnect its viewers; `reason` is a short code, `why` the engine's message, which only
        controllers receive. Does nothing for one that has ended."""
        session = self.get(id)
        if session is None:
            return
        self._end_reasons[id] = reason
        if len(self._end_reasons) > REMEMBERED:
            del self._end_reasons[next(iter(self._end_reasons))]
        told = "Session %(session)s ends: %(reason)s: %(why)s." if why else "Session %(session)s ends: %(reason)s."
        logger.log(logging.WARNING if why else logging.INFO, told, {"session": id, "reason": reason, "why": why})
        ended = {"type": "session_ended", "reason": reason}
        session.broadcast(ended | {"message": why} if why else ended, ended)
        may_be_open = session.may_be_open
        await self._drop(session)
        if may_be_open:
            await self._close(id)

    async def _close(self, id: str) -> None:
        with contextlib.suppress(EngineFailure):  # if it has ended, the session has with it
            await self._connection.send(messages.Close(id))

    def retry_after_s(self) -> int:
        """In how many seconds another session may be opened, as far as is known."""
        now_s = clock.monotonic_s()
        ends = [ends_s - now_s for session in self.sessions if (ends_s := session.lifetime.ends_s) is not None]
        return math.ceil(max(SHORTEST_RETRY_S, min([*ends, LONGEST_RETRY_S])))

    def _no_time(self, demand: ViewerDemand, excluding: str | None = None) -> Unavailable | None:
        """See `EngineLoad.refusal`."""
        why = self.load.refusal(demand, excluding)
        return Unavailable("time", why, self.retry_after_s()) if why else None

    def _add(self, id: str, spec: StreamSpec) -> LiveSession:
        session = LiveSession(
            id, spec, self._config, self.ready, self._connection.send, self._metrics,
            lambda demand: self._no_time(demand, excluding=id), lambda: self.load.occupancy, self.words,
        )  # fmt: skip
        self._sessions[id] = session
        return session

    async def _drop(self, session: LiveSession) -> None:
        """Remove a session, and close its connections, threads and tasks. Mutates: self, session."""
        # Before anything is awaited: a viewer that is just being connected sees it and is refused.
        session.closed = True
        self._sessions.pop(session.id, None)
        self.reopening.pop(session.id, None)
        self.keeper.forget(session.id)
        if self.on_end is not None:
            await self.on_end(session)
        await session.close()

    # ---- the video file of the configuration --------------------------------------------------------------------

    async def feed_file(self, path: str) -> None:
        """Feed the default session with a video file, until that ends or the session does.

        Raises:
            ConfigError: the model takes no video.
        """
        if (session := self.get(DEFAULT_SESSION)) is None:
            return
        source = session.take_input("file")
        source.begin(_play_file(session, source, path))
        message = StrengthMessage(type="strength", strength=session.strength)
        try:
            await session.control_and_wait(message, "file", INPUT_ANSWER_S)
        except Problem as problem:
            # Else the engine has ended, or hangs: the server says so, and `ask_open` tells the next one.
            if problem.code == "refused":
                raise ConfigError(f"session.input: {problem.detail}", field="session.input") from problem

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the background tasks, and open all sessions on the engine."""
        reader = asyncio.create_task(self._read_events(), name="engine-events")
        reader.add_done_callback(self._events_ended)
        self._tasks = [
            reader,
            asyncio.create_task(self.keeper.run(lambda: self.sessions), name="keep-sessions"),
            asyncio.create_task(self._end_expired(), name="housekeeping"),
            asyncio.create_task(self.load.follow(lambda: self.engine.running), name="load"),
        ]
        await self._ask_open(self.sessions)

    async def _ask_open(self, sessions: Sequence[LiveSession]) -> None:
        """Open sessions on the engine, those that are watched first, from their snapshots where there are any."""
        for session in sorted(sessions, key=lambda each: each.idle):
            snapshot = await self.keeper.snapshot(session)
            if snapshot is None and session.id == DEFAULT_SESSION:
                snapshot = self._begin_with
            if session.closed or session.opened:  # meanwhile
                continue
            self.reopening[session.id] = snapshot
            with contextlib.suppress(EngineFailure):  # it has ended at once, and the event that says so comes next
                await session.ask_open(snapshot or None)

    async def _ask_waiting(self) -> None:
        """Ask once more for one session that waits for memory: one that is watched before others, then the one that
        was asked for longest ago."""
        session = min(self.waiting, key=lambda each: (each.idle, each.asked_s), default=None)
        if session is None or self.reopening or not self.engine.running or self.refuse_viewer(session):
            return
        if clock.monotonic_s() - session.asked_s >= MEMORY_RETRY_S:
            self.reopening[session.id] = None
            if self.make_room is not None:
                await self.make_room()
            await self._ask_open([session])

    async def stop(self) -> None:
        """Stop reading and close every session."""
        await end_tasks(*self._tasks)
        for session in self.sessions:
            await session.close()

    async def _end_expired(self) -> None:
        """End sessions that exceed `serve.idle_s`."""
        period_s = min(HOUSEKEEPING_S, (self._config.serve.idle_s or math.inf) / 4)
        while True:
            await asyncio.sleep(period_s)
            now_s = clock.monotonic_s()
            for session in self.sessions:
                with contextlib.suppress(EngineFailure):  # the reader of the engine's events hears of it
                    await session.send_active()
                if now_s >= (session.lifetime.ends_s or math.inf):
                    await self.end(session.id, "idle")
            await self._ask_waiting()

    async def _read_events(self) -> None:
        """Dispatch the engine's events until it ends for good, and keep the reason."""
        reason = "it ended"
        async for event in self._connection.events():
            match event:
                case messages.Failed():
                    reason = event.reason
                case messages.LoadFigures():
                    self.load.measured(event)
                case Restarting():
                    self.engine = EngineStatus("restarting", event.reason, event.retry_after_s)
                    self._metrics.engine_restarts.inc()
                    self.reopening.clear()
                    for session in self.sessions:
                        session.engine_lost(self.engine)
                case Ready():
                    self.ready, self.engine = event, EngineStatus()
                    self.load.restart(event)
                    await self._ask_open(self.sessions)
                case messages.Alive():  # for the IPC socket
                    pass
                case Refused() if self._is_fatal(event):
                    reason = f"it refused to open the session: {event.reason}"
                    break
                case _:
                    self._dispatch(event)
            self.on_event(event)
        self.engine = EngineStatus("failed", reason, ENDED_RETRY_S)

    def _is_fatal(self, refused: Refused) -> bool:
        """Whether a refusal ends everything: the session that the page shows could not be opened."""
        default = self.get(DEFAULT_SESSION)
        if (refused.session, refused.request) != (DEFAULT_SESSION, OPENING) or default is None or default.opened:
            return False
        if refused.code == "memory":  # it is the first that is asked for: at the start the others have none of it yet
            return default.engine.running
        return self.reopening.get(DEFAULT_SESSION) is None or self._begin_with is not None

    def _dispatch(self, event: messages.StreamEvent) -> None:
        """Hand an event to its session, if that is still open."""
        session = self.get(event.session)
        if session is None:
            return
        answers = isinstance(event, messages.Opened) or (isinstance(event, Refused) and event.request == OPENING)
        if answers and session.id in self.reopening:
            snapshot = self.reopening.pop(session.id)
            if isinstance(event, Refused):
                self._not_reopened(session, event, snapshot)
                return
            if session.id == DEFAULT_SESSION:
                self._begin_with = None  # a new engine starts it over, or from what is kept
            if snapshot is not None:
                self._metrics.lost_s.inc(self.keeper.opened(session, snapshot))
            if snapshot:
                self._tasks.append(asyncio.create_task(session.send_paused()))
            if self.waiting:
                self._tasks.append(asyncio.create_task(self._ask_waiting()))
        if isinstance(event, messages.Closed) and event.reason:
            session.handle(event)
            reason = "not_finite" if NOT_FINITE in event.reason else "failed"
            self._tasks.append(asyncio.create_task(self.end(session.id, reason, event.reason)))
        else:
            if isinstance(event, messages.FrameBatch):
                self.load.chunk(session, event)
            session.handle(event)

    def _not_reopened(self, session: LiveSession, refused: Refused, snapshot: Data | None) -> None:
        """A new engine refuses a session of before: it waits where memory is short, starts over where its snapshot
        does not fit, or ends."""
        if refused.code == "memory":
            if session.engine.state != "waiting":
                told = "Session %(session)s is opened when there is memory: %(why)s"
                logger.warning(told, {"session": session.id, "why": refused.reason})
            session.wait_for_memory(refused.reason)
        else:  # viewers take time to go, and others wait for events
            self._tasks.append(asyncio.create_task(self._start_over(session, refused.reason, snapshot)))

    async def _start_over(self, session: LiveSession, why: str, snapshot: Data | None) -> None:
        """Reset a session whose snapshot the engine has refused; end it if it came from a folder, or has none."""
        starts_over = snapshot is not None and self.keeper.refused(session, why)
        if not starts_over and session.id != DEFAULT_SESSION:
            await self.end(session.id, "restart", why)
            return
        self.reopening[session.id] = None
        session.loras = {}  # one of them may be what it was refused for
        with contextlib.suppress(EngineFailure):  # as in `_ask_open`
            await session.ask_open()

    def _events_ended(self, reader: asyncio.Task[None]) -> None:
        """The engine has ended for good."""
        if reader.cancelled():
            return
        error = reader.exception()
        if error is not None:
            logger.error("The engine's events could not be taken.", exc_info=error)
            self.engine = EngineStatus("failed", f"{type(error).__name__}: {error}", ENDED_RETRY_S)
        for session in self.sessions:
            session.engine_lost(self.engine)
            to_all, to_viewers = (
                {"type": "engine_ended", "message": self.engine.message(may_control)} for may_control in (True, False)
            )
            session.broadcast(to_all, to_viewers)
        self.ended.set()


async def _play_file(session: LiveSession, source: VideoInput, path: str) -> None:
    """Play a file to its end, after which the session continues with its prompt only."""
    try:
        await play(path, push=source.push, wanted=lambda: not session.idle)
    except ConfigError as error:
        logger.error("The video for session %(session)s has ended: %(why)s", {"session": session.id, "why": error})
    await session.end_input(source)
