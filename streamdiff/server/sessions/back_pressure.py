"""Back-pressure: the engine is told how far a session's viewers are, so that it makes no more than its lead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from streamdiff.engine.messages import Command, Shown
from streamdiff.errors import EngineFailure


class BackPressure:
    """Sends `Shown` when there is news; the latest count wins. Lives on the event loop."""

    def __init__(self, session: str, passed: Callable[[], int], send: Callable[[Command], Awaitable[None]]) -> None:
        """`passed` is the number of frames shown or skipped so far."""
        self._session, self._passed, self._send = session, passed, send
        self._moved = asyncio.Event()
        self._reporting = asyncio.create_task(self._report(), name=f"shown-{session}")

    def moved(self) -> None:
        """There may be news."""
        self._moved.set()

    async def close(self) -> None:
        """Report no more."""
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)

    async def _report(self) -> None:
        reported = 0
        while True:
            await self._moved.wait()
            self._moved.clear()
            passed = self._passed()
            if passed > reported:
                reported = passed
                try:
                    await self._send(Shown(self._session, passed))
                except EngineFailure:
                    continue  # whoever reads the engine's events says so; the next engine is told when it is asked
