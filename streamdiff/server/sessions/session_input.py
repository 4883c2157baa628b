"""What feeds a session with video: at most one source at a time, how it does, and its strength."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from streamdiff.engine.messages import DEFAULT_STRENGTH, Command, InputFrames, InputUsed, Ready, SetInput
from streamdiff.errors import EngineFailure
from streamdiff.server.media.video_input import Frames, VideoInput
from streamdiff.server.sessions.control import ControlError

logger = logging.getLogger(__name__)


class SessionInput:
    """The input of one session. Lives on the event loop."""

    def __init__(
        self,
        session: str,
        ready: Ready,
        send: Callable[[Command], Awaitable[None]],
        fps: Callable[[], float],
        wanted: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """`send` hands a command to the engine; frames are asked for `fps()` times a second while they are `wanted`;
        `on_change` is called when `state` says something else."""
        self._session, self._size, self._send = session, (ready.width, ready.height), send
        self._fps, self._wanted, self._on_change = fps, wanted, on_change
        self.strength = DEFAULT_STRENGTH
        self.source: VideoInput | None = None
        self._kind, self._fault = "", ""
        self._used: InputUsed | None = None
        self._task: asyncio.Task[None] | None = None

    def take(self, kind: str) -> VideoInput:
        """A new source, which is called `kind`. The engine is still to be told. Mutates: self.

        Raises:
            ControlError: there is another.
        """
        if self.source is not None:
            message = f"The session is fed already, by a {self._kind}; end that first, or open a session of your own."
            raise ControlError("fed", message, "input")
        self.source = VideoInput(*self._size, self._fps, self._feed, self._wanted)
        self._kind, self._fault, self._used = kind, "", None
        return self.source

    def begin(self) -> None:
        """Hand its frames on. Mutates: self."""
        assert self.source is not None
        self._task = asyncio.create_task(self.source.run(), name=f"input-{self._session}")
        self._on_change()

    async def give_back(self, source: VideoInput) -> None:
        """A source has ended: the session goes on from its prompt alone. Does nothing for one before. Mutates: self."""
        if source is not self.source:
            return
        self.source, began = None, self._task is not None
        await self._stop()
        if began:
            with suppress(EngineFailure):  # the next one is told of no input
                await self._send(SetInput(self._session, None))
            self._on_change()

    async def tell(self) -> None:
        """Tell a new engine of the source there is."""
        if self._task is not None:
            await self._send(SetInput(self._session, self.strength))

    def used(self, event: InputUsed) -> None:
        """The engine tells how the input does; where that has failed, the source is to end. Mutates: self."""
        self._used = event
        if event.fault and self.source is not None and not self._fault:
            self._fault = event.fault
            logger.warning("The video for session %s cannot be encoded: %s.", self._session, event.fault)
            self._on_change()
            self.source.on_fault()

    @property
    def holds(self) -> bool:
        """Whether the stream waits for its source."""
        return self.source is not None and self.source.holds

    def state(self, may_control: bool) -> dict[str, Any] | None:
        """What a caller is told that may control the session, or may not; None without a source."""
        if self.source is None:
            return None
        fault = self._fault if may_control or not self._fault else "failed"
        return {"kind": self._kind, "strength": self.strength, "fault": fault}

    def figures(self) -> dict[str, Any] | None:
        """How the source does; None without one."""
        if self.source is None:
            return None
        source, used = self.source, self._used
        level = used.level if used is not None else None
        return {
            "fps": round(source.rate, 1),
            "size": None if source.source_size is None else list(source.source_size),
            "holds": source.holds,
            "left_out": source.left_out,
            "level": None if level is None else round(level, 3),
            "used": used.used if used is not None else 0,
            "dropped": used.dropped if used is not None else 0,
        }

    async def close(self) -> None:
        """End the task."""
        self.source = None
        await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _feed(self, frames: Frames) -> None:
        with suppress(EngineFailure):  # the next one gets what comes then
            await self._send(InputFrames(self._session, frames))
