"""Video input of a session: at most one source at a time, its state and figures, and its strength."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from streamdiff.config import SessionConfig
from streamdiff.engine.messages import DEFAULT_STRENGTH, Command, InputFrames, InputUsed, Ready, SetInput
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.media.video_input import Frames, VideoInput, play
from streamdiff.server.sessions.control import ControlError, StrengthMessage
from streamdiff.server.sessions.receipts import Receipt, StreamEnded

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long the engine is waited for to take an input; a large encoder may be loaded later than that."""


class VideoSource:
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
        self.session, self._size, self._send = session, (ready.width, ready.height), send
        self._fps, self.wanted, self._on_change = fps, wanted, on_change
        self.strength = DEFAULT_STRENGTH
        self.video_input: VideoInput | None = None
        self._kind, self._fault = "", ""
        self._used = InputUsed(session, level=None, used=0, dropped=0)
        self._task: asyncio.Task[None] | None = None

    def take(self, kind: str) -> VideoInput:
        """A new input, called `kind` in messages. `begin` starts it; `announce` says so to the engine. Mutates: self.

        Raises:
            ControlError: there is another.
        """
        if self.video_input is not None:
            end = f"DELETE /api/sessions/{self.session}/input ends that"
            message = f"The session is fed already, by a {self._kind}; {end}. Or open a session of your own."
            raise ControlError("fed", message, "input")
        self.video_input = VideoInput(*self._size, self._fps, self._feed, self.wanted)
        self._kind, self._fault = kind, ""
        self._used = InputUsed(self.session, level=None, used=0, dropped=0)
        return self.video_input

    def begin(self) -> None:
        """Hand its frames on. Mutates: self."""
        assert self.video_input is not None
        self._task = asyncio.create_task(self.video_input.run(), name=f"input-{self.session}")
        self._on_change()

    async def give_back(self, video_input: VideoInput) -> None:
        """Remove an input that has ended: the session continues with its prompt only. Does nothing for an earlier one.
        Mutates: self."""
        if video_input is not self.video_input:
            return
        self.video_input, began = None, self._task is not None
        await self._stop()
        if began:
            with suppress(EngineFailure):  # `announce` sends none to the next one
                await self._send(SetInput(self.session, None))
            self._on_change()

    async def announce(self) -> None:
        """Announce the present input, if any, to a new engine."""
        if self._task is not None:
            await self._send(SetInput(self.session, self.strength))

    def used(self, event: InputUsed) -> None:
        """Take the engine's report on the input; at a fault, `on_fault` of the input is called. Mutates: self."""
        self._used = event
        if event.fault and self.video_input is not None and not self._fault:
            self._fault = event.fault
            logger.warning("The video for session %s cannot be encoded: %s.", self.session, event.fault)
            self._on_change()
            self.video_input.on_fault()

    @property
    def holds(self) -> bool:
        """Whether the stream waits for its source."""
        return self.video_input is not None and self.video_input.holds

    def state(self, may_control: bool) -> dict[str, Any] | None:
        """JSON-able state, with the reason of a fault only for callers that `may_control`; None without an input."""
        if self.video_input is None:
            return None
        fault = self._fault if may_control or not self._fault else "failed"
        return {"kind": self._kind, "strength": self.strength, "fault": fault}

    def figures(self) -> dict[str, Any] | None:
        """JSON-able statistics of the input; None without one."""
        if self.video_input is None:
            return None
        video_input, used = self.video_input, self._used
        return {
            "fps": round(video_input.rate, 1),
            "size": None if video_input.source_size is None else list(video_input.source_size),
            "holds": video_input.holds,
            "left_out": video_input.left_out,
            "level": None if used.level is None else round(used.level, 3),
            "used": used.used,
            "dropped": used.dropped,
        }

    async def close(self) -> None:
        """End the task."""
        self.video_input = None
        await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _feed(self, frames: Frames) -> None:
        with suppress(EngineFailure):  # the next one gets what comes then
            await self._send(InputFrames(self.session, frames))


class FileFeed:
    """The video file of the configuration, for one session. Lives on the event loop."""

    def __init__(
        self,
        config: SessionConfig,
        feeds: VideoSource,
        ask: Callable[[StrengthMessage, str, float], Awaitable[Receipt]],
    ) -> None:
        """`ask` is the session's `control_and_wait`."""
        assert config.input is not None
        self._path, self._input, self._ask = config.input, feeds, ask
        self._task: asyncio.Task[None] | None = None
        self._playing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to feed. Mutates: session.

        Raises:
            ConfigError: the model takes no video.
        """
        video_input = self._input.take("file")
        self._playing = playing = asyncio.create_task(
            play(self._path, push=video_input.push, wanted=self._input.wanted), name="input-file"
        )
        video_input.on_fault = playing.cancel
        self._input.begin()
        self._task = asyncio.create_task(self._run(video_input, playing), name="input-file-end")
        message = StrengthMessage(type="strength", strength=self._input.strength)
        try:
            receipt = await self._ask(message, "file", ANSWER_S)
        except (ControlError, EngineFailure, StreamEnded, TimeoutError):
            return  # the engine has ended, or hangs: the server says so, and `announce` tells the next one
        if receipt.stage == "refused":
            await self.stop()
            raise ConfigError(f"session.input: {receipt.reason}")

    async def _run(self, video_input: VideoInput, playing: asyncio.Task[None]) -> None:
        """Wait for the file's end, after which the session goes on from its prompt alone."""
        session = self._input.session
        try:
            await asyncio.wait({playing})
        finally:
            playing.cancel()
        if not playing.cancelled() and (error := playing.exception()) is not None:
            fields = log_fields(session=session)
            logger.error("The video for session %s has ended: %s", session, error, extra=fields)
        await self._input.give_back(video_input)

    async def end(self) -> bool:
        """End the file before its end; False if it has ended already."""
        if self._playing is None or self._task is None or self._task.done():
            return False
        self._playing.cancel()
        await asyncio.wait({self._task})
        return True

    async def stop(self) -> None:
        """Stop feeding, without a command to the engine."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
