"""The sessions of one server, their places and their ends, and the way of the engine's events to them.

Knows nothing about HTTP or WebRTC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import Alive, Close, Command, Event, Failed, Measured, Ready, Refused
from streamdiff.engine.process.supervisor import Restarting
from streamdiff.errors import EngineFailure, RequestError, StreamdiffError
from streamdiff.server.auth import Tokens
from streamdiff.server.logging_setup import facts
from streamdiff.server.metrics import Metrics, StageMeter
from streamdiff.server.sessions.capacity import Capacity
from streamdiff.server.sessions.engine_state import lost_message
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.spec import Lifetime, SessionSpec

logger = logging.getLogger(__name__)

DEFAULT_SESSION = "default"
OPEN_TIMEOUT_S = 60.0
LONGEST_RETRY_S, SHORTEST_RETRY_S = 60.0, 1.0
HOUSEKEEPING_S = 1.0
RESERVED_S = 30.0
"""How long a session that was asked for keeps its share of the engine's time before anybody watches."""
REMEMBERED = 1024
"""Ended sessions of which it is still known why."""


class EngineConnection(Protocol):
    """The web side's end of the bridge to the engine."""

    async def send(self, command: Command) -> None:
        """Hand a command to the engine."""

    def events(self) -> AsyncIterator[Event | Restarting]:
        """What the engine says, until it ends; after `Restarting` a new one says it, which begins with `Ready`."""


class SessionUnavailable(StreamdiffError):
    """A session that cannot be opened now: `code` is `time`, `memory`, `draining`, `restarting` or `engine`."""

    def __init__(self, code: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass
class _Place:
    """A session's place, from the moment it is promised; until `reserved_until_s` its share is kept for those who will
    watch."""

    view: LiveSession
    lifetime: Lifetime
    reserved_until_s: float

    def plays(self, now_s: float) -> bool:
        """Whether the engine makes frames for it, or is about to: a session that nobody watches takes memory only."""
        return self.view.watched or not self.view.idle or now_s < self.reserved_until_s


class SessionManager:
    """Opens, feeds and ends sessions. `failed` says why the engine ended, once it has; `occupancy` is the share of the
    time each stage was at work, as the engine told last. While `draining` no session is opened."""

    def __init__(self, config: Config, client: EngineConnection, ready: Ready, metrics: Metrics) -> None:
        self.ready = ready
        self.failed: str | None = None
        self.restarting: Restarting | None = None
        """What is told while the engine is started again."""
        self.draining = False
        self.ended = asyncio.Event()
        self.occupancy: tuple[float, ...] = ()
        self.on_end: Callable[[LiveSession, str], Awaitable[None]] | None = None
        """Called when a session ends, before its threads do: closes what its viewers hold."""
        self.capacity = Capacity(ready.chunk_frames, ready.steps, config.serve.load, ready.work_s)
        self._config, self._client, self._metrics = config, client, metrics
        self._stages = StageMeter(metrics)
        self._places: dict[str, _Place] = {}
        self._gone: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        spec = SessionSpec(config.session.prompt, config.session.seed, config.playback.fps)
        self._take_place(DEFAULT_SESSION, spec, None, None, 0.0)

    # ---- what there is ------------------------------------------------------------------------------------------

    def view(self, session: str) -> LiveSession | None:
        """The view of a session, or None if there is no such session."""
        place = self._places.get(session)
        return place.view if place else None

    @property
    def views(self) -> list[LiveSession]:
        """All sessions, in the order of their opening."""
        return [place.view for place in self._places.values()]

    def lifetime(self, session: str) -> Lifetime:
        """When an open session ends by itself."""
        return self._places[session].lifetime

    def end_of(self, session: str) -> str | None:
        """Why a session of that name ended; None if there never was one, or long ago."""
        return self._gone.get(session)

    def room(self) -> int | None:
        """How many more sessions of the default kind could play; None: not measured yet."""
        room = self.capacity.room(self.shares(), self.share(self._config.playback.fps))
        fit = self.ready.sessions_fit
        if room is None or fit is None:
            return room
        return max(0, min(room, fit - len(self._places)))

    def shares(self, but: str | None = None) -> list[float]:
        """The share of the engine's time that each session takes, without that of `but`; 0 where nobody watches."""
        now_s = clock.monotonic_s()
        places = [place for place in self._places.values() if place.view.session != but]
        return [self.share(place.view.fps, place.view.steps) if place.plays(now_s) else 0.0 for place in places]

    def share(self, fps: float, steps: int | None = None) -> float:
        """The share of the engine's time that a session takes while it plays."""
        return self.capacity.share(fps, clock.monotonic_s(), steps)

    def work_s(self) -> float | None:
        """Seconds of work in a chunk in the usual number of steps; None: not measured yet."""
        return self.capacity.work_s(clock.monotonic_s())

    # ---- open and end -------------------------------------------------------------------------------------------

    async def open(self, spec: SessionSpec) -> LiveSession:
        """Open a session.

        Raises:
            NoPlace: not now: no time, no memory, the server is about to end, or the engine has.
            RequestError: never in this way; names the field.
        """
        if self.failed is not None:
            raise SessionUnavailable("engine", f"The engine stopped: {self.failed}", 5)
        if (again := self.restarting) is not None:
            raise SessionUnavailable(
                "restarting", f"The engine is being started again: {again.reason}", again.retry_after_s
            )
        if self.draining:
            raise SessionUnavailable("draining", "The server is about to end and opens no more sessions.", 5)
        steps = self.ready.steps if spec.steps is None else spec.steps
        if why := self.capacity.refusal(self.shares(), self.share(spec.fps, steps)):
            raise SessionUnavailable("time", why, self.retry_after_s())
        serve = self._config.serve
        # Nothing is awaited between the look at the shares and this: the place is taken.
        view = self._take_place(f"s-{secrets.token_urlsafe(9)}", spec, serve.idle_s, serve.lifetime_s, RESERVED_S)
        view.tokens = Tokens.fresh()
        try:
            await view.ask_open()
            await view.wait_open(OPEN_TIMEOUT_S)
        except BaseException as error:
            await self._drop(view)
            if not isinstance(error, RequestError):
                await self._close(view.session)  # it may open yet
            if isinstance(error, RequestError) and error.code == "memory":
                raise SessionUnavailable("memory", str(error), self.retry_after_s()) from error
            if isinstance(error, TimeoutError | EngineFailure):
                raise SessionUnavailable("engine", "The engine did not open the session.", 5) from error
            raise
        told = facts(session=view.session, fps=view.fps, steps=view.steps, seed=view.seed)
        logger.info("Session %s was opened.", view.session, extra=told)
        return view

    async def end(self, session: str, reason: str) -> None:
        """End a session and all who watch it; `reason` is a word or two. Does nothing for one that has ended."""
        place = self._places.get(session)
        if place is None:
            return
        view = place.view
        self._remember(session, reason)
        logger.info("Session %s ends: %s.", session, reason, extra=facts(session=session, reason=reason))
        view.say({"type": "session_ended", "reason": reason})
        await self._drop(view)
        if view.opened:
            await self._close(session)

    async def _close(self, session: str) -> None:
        with contextlib.suppress(EngineFailure):  # if it has ended, the session has with it
            await self._client.send(Close(session))

    def retry_after_s(self) -> int:
        """In how many seconds a place may be free, as far as is known."""
        now_s = clock.monotonic_s()
        ends = [end[0] - now_s for place in self._places.values() if (end := place.lifetime.end()) is not None]
        soonest_s = min(ends, default=LONGEST_RETRY_S)
        return math.ceil(min(max(soonest_s, SHORTEST_RETRY_S), LONGEST_RETRY_S))

    def _take_place(
        self,
        name: str,
        spec: SessionSpec,
        idle_s: float | None,
        lifetime_s: float | None,
        reserved_s: float,
    ) -> LiveSession:
        def may_play(fps: float, steps: int) -> str:
            return self.capacity.refusal(self.shares(but=name), self.share(fps, steps))

        def occupancy() -> tuple[float, ...]:
            return self.occupancy

        client, metrics = self._client, self._metrics
        view = LiveSession(name, spec, self._config, self.ready, client.send, metrics, may_play, occupancy)
        now_s = clock.monotonic_s()
        self._places[name] = _Place(view, Lifetime(now_s, idle_s, lifetime_s), now_s + reserved_s)
        self._metrics.sessions.set(len(self._places))
        return view

    async def _drop(self, view: LiveSession) -> None:
        """Forget a session and end what belongs to it. Mutates: self, view."""
        # Before anything is awaited: a viewer that is just being connected sees it and is refused.
        view.closed = True
        self._places.pop(view.session, None)
        self._metrics.sessions.set(len(self._places))
        if self.on_end is not None:
            await self.on_end(view, self._gone.get(view.session, "refused"))
        await view.close()

    def _remember(self, session: str, reason: str) -> None:
        self._gone[session] = reason
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ask for the default session and begin to read events."""
        reader = asyncio.create_task(self._read(), name="engine-events")
        reader.add_done_callback(self._ended)
        self._tasks = [reader, asyncio.create_task(self._keep_house(), name="housekeeping")]
        for view in self.views:
            with contextlib.suppress(EngineFailure):  # it has ended at once, which the reader is told
                await view.ask_open()

    async def stop(self) -> None:
        """Stop reading and end every view."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for view in self.views:
            await view.close()

    async def _keep_house(self) -> None:
        """End sessions whose time has come."""
        limits = [limit for limit in (self._config.serve.idle_s, self._config.serve.lifetime_s) if limit is not None]
        while True:
            await asyncio.sleep(min([HOUSEKEEPING_S, *(limit / 4 for limit in limits)]))
            now_s = clock.monotonic_s()
            for name, place in list(self._places.items()):
                place.lifetime.watch(place.view.watched, now_s)
                end = place.lifetime.end()
                if end is not None and now_s >= end[0]:
                    await self.end(name, end[1])

    async def _read(self) -> None:
        """Pass events on until there are no more, and say why."""
        reason = "it ended"
        async for event in self._client.events():
            match event:
                case Failed():
                    reason = event.reason
                case Measured():
                    self.capacity.measured(event.work_s, clock.monotonic_s())
                    self.occupancy = event.occupancy
                    self._stages.told(event.busy_s)
                case Restarting():
                    self._lost(event)
                case Ready():
                    await self._reopen(event)
                case Alive():  # for the bridge
                    pass
                case _:
                    view = self.view(event.session)
                    if view is not None and isinstance(event, Refused) and self._is_fatal(view):
                        self.failed = f"it refused to open the session: {event.reason}"
                        return
                    if view is not None and isinstance(event, Refused) and view.engine == "restarting":
                        # The new engine has no place for it. Viewers take time to go, and others wait for events.
                        self._tasks.append(asyncio.create_task(self.end(view.session, "restart")))
                        continue
                    if view is not None:
                        view.handle(event)
        self.failed = reason

    def _lost(self, restarting: Restarting) -> None:
        """The engine has ended, another is started. Mutates: self."""
        self.restarting = restarting
        self._metrics.engine_restarts.inc()
        for view in self.views:
            view.lost("restarting", restarting.reason)

    async def _reopen(self, ready: Ready) -> None:
        """Another engine is there: open all sessions on it. Mutates: self."""
        self.ready, self.restarting = ready, None
        self.capacity.restart(ready.work_s)
        for view in self.views:
            with contextlib.suppress(EngineFailure):  # it has ended too, and `Restarting` comes next
                await view.ask_open()

    def _is_fatal(self, view: LiveSession) -> bool:
        """Whether a refusal ends everything: the session that the page shows could not be opened."""
        return view.session == DEFAULT_SESSION and not view.opened

    def _ended(self, reader: asyncio.Task[None]) -> None:
        if reader.cancelled():
            return
        error = reader.exception()
        if error is not None:
            logger.error("The engine's events could not be taken.", exc_info=error)
            self.failed = f"{type(error).__name__}: {error}"
        self.restarting = None
        for view in self.views:
            reason = self.failed or "it ended"
            view.lost("failed", reason)
            said, plain = (
                {"type": "engine_ended", "message": lost_message("failed", reason, may_control)}
                for may_control in (True, False)
            )
            view.say(said, to_viewers=plain)
        self.ended.set()
