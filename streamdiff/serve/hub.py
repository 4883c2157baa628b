"""The sessions of one server, and the way of the engine's events to them. Knows nothing about HTTP or WebRTC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from streamdiff.config import Config
from streamdiff.engine.messages import Command, Event, Failed, Measured, Ready, Refused
from streamdiff.serve.codecs import Format
from streamdiff.serve.metrics import Metrics
from streamdiff.serve.session_view import SessionView

logger = logging.getLogger(__name__)

DEFAULT_SESSION = "default"


class Client(Protocol):
    """The web side's end of the bridge to the engine."""

    async def send(self, command: Command) -> None:
        """Hand a command to the engine."""

    def events(self) -> AsyncIterator[Event]:
        """What the engine says, until it ends."""


class Hub:
    """Opens the default session and keeps every view fed. `failed` says why the engine ended, once it has."""

    def __init__(self, config: Config, client: Client, ready: Ready, fmt: Format, metrics: Metrics) -> None:
        self.ready = ready
        self.failed: str | None = None
        self.ended = asyncio.Event()
        self._client = client
        self._views = {DEFAULT_SESSION: SessionView(DEFAULT_SESSION, config, ready, fmt, client.send, metrics)}
        self._reader: asyncio.Task[str] | None = None

    def view(self, session: str) -> SessionView | None:
        """The view of a session, or None if there is no such session."""
        return self._views.get(session)

    async def start(self) -> None:
        """Open the sessions and begin to read events."""
        self._reader = asyncio.create_task(self._read(), name="engine-events")
        self._reader.add_done_callback(self._ended)
        for view in self._views.values():
            await view.open()

    async def stop(self) -> None:
        """Stop reading and end every view."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for view in self._views.values():
            await view.close()

    async def _read(self) -> str:
        """Pass events on until there are no more; says why."""
        reason = "it ended"
        async for event in self._client.events():
            if isinstance(event, Failed):
                reason = event.reason
            elif not isinstance(event, Ready | Measured):
                view = self._views.get(event.session)
                if view is not None and isinstance(event, Refused) and not view.opened:
                    return f"it refused to open the session: {event.reason}"
                if view is not None:
                    view.handle(event)
        return reason

    def _ended(self, reader: asyncio.Task[str]) -> None:
        if reader.cancelled():
            return
        error = reader.exception()
        if error is not None:
            logger.error("The engine's events could not be taken.", exc_info=error)
        self.failed = reader.result() if error is None else f"{type(error).__name__}: {error}"
        for view in self._views.values():
            view.say({"type": "engine_ended", "message": f"The engine stopped: {self.failed}"})
        self.ended.set()
