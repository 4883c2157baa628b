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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import Alive, Close, Command, Data, Event, Failed, Measured, Opened, Ready, Refused
from streamdiff.engine.process.supervisor import Restarting
from streamdiff.errors import EngineFailure, RequestError, StreamdiffError
from streamdiff.server.auth import Tokens
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.sessions.capacity import Capacity, Lifetime
from streamdiff.server.sessions.engine_status import EngineStatus
from streamdiff.server.sessions.keeper import SessionKeeper, spec_of
from streamdiff.server.sessions.live_session import LiveSession, SessionEvent, SessionSpec
from streamdiff.server.sessions.session_files import FoundSession
from streamdiff.video.picture import fit_picture

logger = logging.getLogger(__name__)

DEFAULT_SESSION = "default"
OPEN_TIMEOUT_S = 60.0
ENDED_RETRY_S = 5
LONGEST_RETRY_S, SHORTEST_RETRY_S = 60.0, 1.0
HOUSEKEEPING_S = 1.0
RESERVED_S = 30.0
"""How long a new session keeps its share of the engine's time before anybody watches."""
REMEMBERED = 1024
"""Ended sessions whose reason is remembered."""


class EngineConnection(Protocol):
    """The web side's end of the bridge to the engine."""

    async def send(self, command: Command) -> None:
        """Hand a command to the engine."""

    def events(self) -> AsyncIterator[Event | Restarting]:
        """The engine's events, until it ends; after `Restarting` those of a new engine, beginning with `Ready`."""


class SessionUnavailable(StreamdiffError):
    """A session that cannot be opened now: `code` is `time`, `memory`, `draining`, `restarting` or `engine`."""

    def __init__(self, code: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class SessionManager:
    """The open sessions. `occupancy` is the share of the time that each stage was at work, as the engine reported last,
    and `batching` its forwards by rows, and those of one row by the reason, since it began.
    While `draining` no session is opened; `ended` is set when the engine has ended for good."""

    def __init__(
        self,
        config: Config,
        connection: EngineConnection,
        ready: Ready,
        metrics: Metrics,
        keeper: SessionKeeper | None = None,
        found: Sequence[FoundSession] = (),
    ) -> None:
        """`found` are sessions that a server before has left; they go on here. Without `keeper` none is kept."""
        self.ready = ready
        self.engine = EngineStatus()
        self.draining = False
        self.ended = asyncio.Event()
        self.occupancy: tuple[float, ...] = ()
        self.batching: dict[str, dict[str, int]] = {"rows": {}, "alone": {}}
        self.on_end: Callable[[LiveSession, str], Awaitable[None]] | None = None
        """Called when a session ends, before its threads do: closes the connections of its viewers."""
        self.on_event: Callable[[Event | Restarting], None] = lambda event: None
        """Called with everything that the engine says, after the sessions have heard it."""
        self.make_room: Callable[[], Awaitable[bool]] | None = None
        """Has who can wait give back memory that a new session needs; says whether there was anything."""
        self.capacity = Capacity(ready.chunk_frames, ready.steps, config.serve.load, ready.work_s)
        self._config, self._connection, self._metrics = config, connection, metrics
        name = config.serve.name
        self._prefix = "s-" if name is None else f"s-{name}-"
        self._busy_s: defaultdict[int, CounterDelta] = defaultdict(CounterDelta)  # by stage
        self._forwards: defaultdict[str, CounterDelta] = defaultdict(CounterDelta)  # by rows, or by reason
        self._sessions: dict[str, LiveSession] = {}
        self._end_reasons: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._keeper = SessionKeeper(config.serve, (None, None)) if keeper is None else keeper
        self._going_on: dict[str, Data] = {}  # by session, what the engine has been asked to go on from
        start = config.session
        image = None if start.image is None else fit_picture(start.image, ready.width, ready.height, start.fit)[None]
        self._add(DEFAULT_SESSION, SessionSpec(start.prompt, start.seed, config.playback.fps, image=image))
        for each in found:
            session = self._add(each.record.id, spec_of(each.record, ready))
            session.reserved_until_s = clock.monotonic_s() + RESERVED_S
            self._keeper.take_up(each, session, config.serve)

    # ---- what there is ------------------------------------------------------------------------------------------

    def get(self, id: str) -> LiveSession | None:
        """An open session, or None if there is none of that name."""
        return self._sessions.get(id)

    @property
    def sessions(self) -> list[LiveSession]:
        """All sessions, in the order of their opening."""
        return list(self._sessions.values())

    def end_reason(self, id: str) -> str | None:
        """Why a session of that name ended; None if there never was one, or long ago."""
        if id in self._sessions:
            return None
        # With a name of its own, a server knows an id that it gave out before it was started again.
        is_own = self._config.serve.name is not None and id.startswith(self._prefix)
        return self._end_reasons.get(id, "restart" if is_own else None)

    def free_sessions(self) -> int | None:
        """How many more sessions of the default kind could play; None: not measured yet."""
        free = self.capacity.free_sessions(self.shares(), self.share(self._config.playback.fps))
        by_memory = self.ready.sessions_fit
        if free is None or by_memory is None:
            return free
        return max(0, min(free, by_memory - len(self._sessions)))

    def shares(self, excluding: str | None = None) -> list[float]:
        """The share of the engine's time that each session but `excluding` takes; 0 where nobody watches."""
        now_s = clock.monotonic_s()
        others = [session for session in self.sessions if session.id != excluding]
        return [self.share(each.fps, each.steps) if each.plays(now_s) else 0.0 for each in others]

    def share(self, fps: float, steps: int | None = None) -> float:
        """The share of the engine's time that a session takes while it plays."""
        return self.capacity.share(fps, clock.monotonic_s(), steps)

    # ---- open and end -------------------------------------------------------------------------------------------

    async def open(self, spec: SessionSpec) -> LiveSession:
        """Open a session.

        Raises:
            SessionUnavailable: no time, no memory, the server is about to end, or the engine does not run.
            RequestError: a field that the engine never takes; names it.
        """
        if not self.engine.running:
            raise SessionUnavailable(self.engine.code, self.engine.message(True), self.engine.retry_after_s)
        if self.draining:
            raise SessionUnavailable("draining", "The server is about to end and opens no more sessions.", 5)
        steps = self.ready.steps if spec.steps is None else spec.steps
        if why := self.capacity.refusal(self.shares(), self.share(spec.fps, steps)):
            raise SessionUnavailable("time", why, self.retry_after_s())
        # Nothing is awaited between the look at the shares and this, which takes one.
        session = self._add(f"{self._prefix}{secrets.token_urlsafe(9)}", spec)
        serve, now_s = self._config.serve, clock.monotonic_s()
        session.lifetime = Lifetime(now_s, serve.idle_s, serve.lifetime_s)
        session.reserved_until_s = now_s + RESERVED_S
        session.tokens = Tokens.fresh()
        try:
            await self._open_on_engine(session)
        except BaseException as error:
            await self._drop(session)
            if not isinstance(error, RequestError):
                await self._close(session.id)  # it may open yet
            if isinstance(error, RequestError) and error.code == "memory":
                raise SessionUnavailable("memory", str(error), self.retry_after_s()) from error
            if isinstance(error, TimeoutError | EngineFailure):
                raise SessionUnavailable("engine", "The engine did not open the session.", ENDED_RETRY_S) from error
            raise
        fields = log_fields(session=session.id, fps=session.fps, steps=session.steps, seed=session.seed)
        logger.info("Session %s was opened.", session.id, extra=fields)
        return session

    async def _open_on_engine(self, session: LiveSession) -> None:
        """Ask the engine for a session; once more where what can wait has given back memory. Mutates: session."""
        try:
            await session.ask_open()
            await session.wait_open(OPEN_TIMEOUT_S)
        except RequestError as error:
            if error.code != "memory" or self.make_room is None or not await self.make_room():
                raise
            session.open_again()
            await session.ask_open()
            await session.wait_open(OPEN_TIMEOUT_S)

    async def end(self, id: str, reason: str) -> None:
        """End a session and all who watch it; `reason` is a short code. Does nothing for one that has ended."""
        session = self.get(id)
        if session is None:
            return
        self._end_reasons[id] = reason
        if len(self._end_reasons) > REMEMBERED:
            del self._end_reasons[next(iter(self._end_reasons))]
        logger.info("Session %s ends: %s.", id, reason, extra=log_fields(session=id, reason=reason))
        session.subscribers.broadcast({"type": "session_ended", "reason": reason})
        await self._drop(session)
        if session.opened:
            await self._close(id)

    async def _close(self, id: str) -> None:
        with contextlib.suppress(EngineFailure):  # if it has ended, the session has with it
            await self._connection.send(Close(id))

    def retry_after_s(self) -> int:
        """In how many seconds another session may be opened, as far as is known."""
        now_s = clock.monotonic_s()
        ends = [end[0] - now_s for session in self.sessions if (end := session.lifetime.end()) is not None]
        soonest_s = min(ends, default=LONGEST_RETRY_S)
        return math.ceil(min(max(soonest_s, SHORTEST_RETRY_S), LONGEST_RETRY_S))

    def _add(self, id: str, spec: SessionSpec) -> LiveSession:
        def may_play(fps: float, steps: int) -> str:
            return self.capacity.refusal(self.shares(excluding=id), self.share(fps, steps))

        send = self._connection.send
        session = LiveSession(id, spec, self._config, self.ready, send, self._metrics, may_play, lambda: self.occupancy)
        self._sessions[id] = session
        return session

    async def _drop(self, session: LiveSession) -> None:
        """Forget a session and end what belongs to it. Mutates: self, session."""
        # Before anything is awaited: a viewer that is just being connected sees it and is refused.
        session.closed = True
        self._keeper.forget(session.id)
        self._sessions.pop(session.id, None)
        if self.on_end is not None:
            await self.on_end(session, self._end_reasons.get(session.id, "refused"))
        await session.close()

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ask for the default session and begin to read events."""
        reader = asyncio.create_task(self._read_events(), name="engine-events")
        reader.add_done_callback(self._events_ended)
        keeping = asyncio.create_task(self._keeper.run(lambda: self.sessions), name="keep-sessions")
        self._tasks = [reader, keeping, asyncio.create_task(self._end_expired(), name="housekeeping")]
        await self._ask_open()

    async def _ask_open(self) -> None:
        """Open all sessions on the engine, from what is kept of them."""
        for session in self.sessions:
            snapshot = await self._keeper.snapshot(session)
            if snapshot is not None:
                self._going_on[session.id] = snapshot
            with contextlib.suppress(EngineFailure):  # it has ended at once, and the event that says so comes next
                await session.ask_open(snapshot)

    async def hand_over(self) -> None:
        """Open no more sessions, and leave those there are in `serve.handover` for the next server."""
        self.draining = True
        await self._keeper.hand_over(self.sessions)

    async def end_keeping(self) -> None:
        """The server ends as it was asked to: nobody goes on from what it has kept."""
        await self._keeper.end()

    async def stop(self) -> None:
        """Stop reading and close every session."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self.sessions:
            await session.close()

    async def _end_expired(self) -> None:
        """End sessions that nobody watches, or that have lasted as long as they may."""
        limits = [limit for limit in (self._config.serve.idle_s, self._config.serve.lifetime_s) if limit is not None]
        while True:
            await asyncio.sleep(min([HOUSEKEEPING_S, *(limit / 4 for limit in limits)]))
            now_s = clock.monotonic_s()
            for session in self.sessions:
                session.lifetime.watch(session.watched, now_s)
                end = session.lifetime.end()
                if end is not None and now_s >= end[0]:
                    await self.end(session.id, end[1])

    async def _read_events(self) -> None:
        """Pass events on until there are no more, and note why."""
        reason = "it ended"
        async for event in self._connection.events():
            match event:
                case Failed():
                    reason = event.reason
                case Measured():
                    self._take_measurements(event)
                case Restarting():
                    self.engine = EngineStatus("restarting", event.reason, event.retry_after_s)
                    self._metrics.engine_restarts.inc()
                    for session in self.sessions:
                        session.engine_lost(self.engine)
                case Ready():
                    self.ready, self.engine = event, EngineStatus()
                    self.capacity.restart(event.work_s)
                    await self._ask_open()
                case Alive():  # for the bridge
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
        is_default = refused.session == DEFAULT_SESSION and refused.session not in self._going_on
        return is_default and default is not None and not default.opened

    def _dispatch(self, event: SessionEvent) -> None:
        """Hand an event to its session, if that is still open."""
        session = self.get(event.session)
        if session is not None and not session.opened and isinstance(event, Opened | Refused):
            snapshot = self._going_on.pop(session.id, None)
            if snapshot is not None and isinstance(event, Refused):
                self._tasks.append(asyncio.create_task(self._begin_afresh(session, event.reason)))
                return
            if snapshot is not None:
                self._metrics.lost_s.inc(self._keeper.opened(session, snapshot))
                self._tasks.append(asyncio.create_task(session.tell_paused()))
        if session is not None and isinstance(event, Refused) and session.engine.state == "restarting":
            # The new engine has no memory for it. Viewers take time to go, and others wait for events.
            self._tasks.append(asyncio.create_task(self.end(session.id, "restart")))
        elif session is not None:
            session.handle(event)

    async def _begin_afresh(self, session: LiveSession, why: str) -> None:
        """The engine has refused to go on with a session: it begins afresh, or ends where it came with a file."""
        if not self._keeper.refused(session, why) and session.id != DEFAULT_SESSION:
            await self.end(session.id, "restart")
            return
        with contextlib.suppress(EngineFailure):  # as in `_ask_open`
            await session.ask_open()

    def _take_measurements(self, measured: Measured) -> None:
        self.capacity.measured(measured.work_s, clock.monotonic_s())
        self.occupancy = measured.occupancy
        for stage, total_s in enumerate(measured.busy_s):
            self._metrics.stage_busy_s.labels(str(stage)).inc(self._busy_s[stage].increase(total_s))
        self.batching = {
            "rows": {str(rows): count for rows, count in enumerate(measured.forwards, 1) if count},
            "alone": dict(zip(measured.alone, measured.alone_forwards, strict=True)),
        }
        for rows, count in enumerate(measured.forwards, 1):
            self._metrics.forwards.labels(str(rows)).inc(self._forwards[str(rows)].increase(count))
        for reason, count in self.batching["alone"].items():
            self._metrics.alone.labels(reason).inc(self._forwards[reason].increase(count))

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
            session.subscribers.broadcast(to_all, to_viewers)
        self.ended.set()
