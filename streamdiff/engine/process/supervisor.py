"""Starts an engine process, and restarts it on failure, within limits. Torch-free, asyncio.

Independent of sessions: the reader of `events` opens them again on the new engine at its `Ready`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from zmq import ZMQError

from streamdiff import clock
from streamdiff.engine.messages import Command, Event, Failed, Ready
from streamdiff.engine.process.engine_process import EngineProcess, name_exit
from streamdiff.engine.process.ipc import EngineClient
from streamdiff.errors import ConfigError, EngineFailure

logger = logging.getLogger(__name__)


SPARE_AGAIN_S = 30.0
"""After the spare has died, before another is started."""


@dataclass(frozen=True)
class Restarting:
    """The engine has failed and is started again; `Ready` follows, or `Failed` for good.

    `reason` is one line; `retry_after_s`: in how many seconds it may be back, as far as is known.
    """

    reason: str
    retry_after_s: int


class EngineSupervisor:
    """Starts an engine, and restarts it when it fails. `make` gives a new engine process, not started; `restarts` says
    how often."""

    def __init__(self, make: Callable[[], EngineProcess], restarts: RestartPolicy, *, spare: bool = False) -> None:
        """`spare`: beside every engine that runs, another one waits, prepared."""
        self._make, self._restarts = make, restarts
        self._engine = make()
        self._keep_standby = spare and restarts.most > 0
        self._standby: EngineProcess | None = None
        self._standby_watch: asyncio.Task[None] | None = None
        self._ipc: EngineClient | None = None
        self._down_reason = "it has not been started"
        self._start_times_s: dict[bool, float] = {}
        """How long the last start took, by whether it was a spare's."""
        self.gave_up = False
        """Whether it failed more often than `restarts` allows."""

    @property
    def ready(self) -> Ready:
        """The running engine's `Ready` event; after `start`."""
        return self._engine.ready

    async def start(self) -> None:
        """Start the engine for the first time; a failure here is raised, and nothing is retried.

        Raises:
            ConfigError, EngineFailure: see `EngineProcess.start`.
        """
        begun_s = clock.monotonic_s()
        self._ipc = await self._engine.start()
        self._start_times_s[False] = clock.monotonic_s() - begun_s
        await self._start_standby()

    async def stop(self) -> None:
        """End the engine, and the spare at the same time. May be called at any time, and again, but not while
        `events` is read."""
        await self._stop_standby_watch()
        await asyncio.gather(*(each.stop() for each in (self._engine, self._standby) if each is not None))

    async def send(self, command: Command) -> None:
        """Send `command` to the engine that runs.

        Raises:
            EngineFailure: none does.
        """
        if self._ipc is None:
            raise EngineFailure(self._down_reason)
        await self._ipc.send(command)

    async def events(self) -> AsyncGenerator[Event | Restarting, None]:
        """Every event of every engine in order: after a failure `Restarting`, once or several times, then the new
        engine's `Ready`, or `Failed` as the last. Ends when the engine is asked to end. For one reader."""
        while self._ipc is not None:
            reason: str | None = None
            async with aclosing(self._ipc.events()) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        reason = event.reason
                        break
                    yield event
            self._ipc = None
            if reason is not None:
                async for word in self._restart(reason):
                    yield word

    async def _restart(self, reason: str) -> AsyncGenerator[Ready | Failed | Restarting, None]:
        """Start engines until one runs or the restart limit is reached."""
        failed_s, known = clock.monotonic_s(), self._engine.ready
        while self._ipc is None:
            self._down_reason = reason
            wait_s = self._restarts.fault(clock.monotonic_s())
            if wait_s is None:
                self.gave_up = self._restarts.most > 0
                yield Failed(self._final_reason(reason))
                await self.stop()  # the spare too: nothing is started any more
                return
            which = (
                f"restart {self._restarts.count} of at most {self._restarts.most} within {self._restarts.window_s:g} s"
            )
            logger.warning("%s\nThe engine is started again in %g s (%s).", reason, wait_s, which)
            spare = self._standby is not None and self._standby.alive
            start_s = self._start_times_s.get(spare, self._start_times_s[False])  # as long as the last of its kind
            yield Restarting(_first_line(reason), max(1, math.ceil(wait_s + start_s)))
            await self._engine.stop()
            await asyncio.sleep(wait_s)
            await self._stop_standby_watch()
            if self._standby is not None and not self._standby.alive:
                await self._standby.stop()
                self._standby = None
            was_standby = self._standby is not None
            self._engine, self._standby = self._standby or self._make(), None
            begun_s = clock.monotonic_s()
            try:
                ipc = await self._engine.start()
                _check_same_model(known, self._engine.ready)
            except (EngineFailure, ConfigError) as error:
                reason = str(error)
            else:
                self._ipc = ipc
                self._start_times_s[was_standby] = clock.monotonic_s() - begun_s
        logger.warning("The engine runs again after %.1f s.", clock.monotonic_s() - failed_s)
        await self._start_standby()
        yield self._engine.ready

    async def _start_standby(self) -> None:
        """Have another spare wait. That there is none, for want of processes or files, is no fault of the engine."""
        if not self._keep_standby:
            return
        self._standby = self._make()
        try:
            await self._standby.prepare()
        except (OSError, ZMQError) as error:
            self._standby = None
            logger.warning("No spare engine waits, the next restart takes longer: %s", error)
        else:
            self._standby_watch = asyncio.create_task(self._watch_standby(self._standby), name="spare-mind")

    async def _watch_standby(self, spare: EngineProcess) -> None:
        """Replace a standby engine that dies, after a pause, as memory may be short."""
        how = name_exit(await spare.wait())
        logger.warning("The spare engine ended %s; another starts in %g s.", how, SPARE_AGAIN_S)
        await spare.stop()
        await asyncio.sleep(SPARE_AGAIN_S)
        await self._start_standby()

    async def _stop_standby_watch(self) -> None:
        """Stop watching the standby engine. Mutates: self."""
        if self._standby_watch is not None:
            self._standby_watch.cancel()
            await asyncio.wait({self._standby_watch})
            self._standby_watch = None

    def _final_reason(self, reason: str) -> str:
        most, window_s = self._restarts.most, self._restarts.window_s
        if most == 0:
            return reason
        return (
            f"the engine failed again after {most} restarts within {window_s:g} s, and is not started any more "
            f"(serve.max_restarts); start the server again when this is mended: {reason}"
        )


def _first_line(reason: str) -> str:
    """The first line of a failure reason, without its remark on the engine's output."""
    return reason.split("\n", 1)[0].removesuffix("; the last it wrote:").removesuffix("; it wrote nothing")


def _check_same_model(before: Ready, after: Ready) -> None:
    """Raises EngineFailure for pictures of another kind: encoders and viewers are set up for those before."""
    fields = ("model", "width", "height", "native_fps", "chunk_frames")
    differs = [f"{name} {getattr(before, name)} before, {getattr(after, name)} now" for name in fields
               if getattr(before, name) != getattr(after, name)]  # fmt: skip
    if differs:
        raise EngineFailure(f"the engine came back as another one: {', '.join(differs)}")


FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0


@dataclass
class RestartPolicy:
    """At most `most` restarts within `window_s` seconds. The first comes at once, the second after `wait_s`, each
    further one after twice as long, up to LONGEST_WAIT_S; what is older than the window is forgotten."""

    most: int
    window_s: float = 300.0
    wait_s: float = field(default_factory=lambda: FIRST_WAIT_S)
    _at_s: deque[float] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Restarts within the window, as of the last fault."""
        return len(self._at_s)

    def fault(self, now_s: float) -> float | None:
        """Record a failure at `now_s`; returns the seconds to wait before the restart, or None: no further restart.
        Mutates: self."""
        while self._at_s and now_s - self._at_s[0] >= self.window_s:
            self._at_s.popleft()
        if len(self._at_s) >= self.most:
            return None
        self._at_s.append(now_s)
        doublings = len(self._at_s) - 2
        return 0.0 if doublings < 0 else min(self.wait_s * 2.0**doublings, LONGEST_WAIT_S)
