"""Asks the engine for snapshots of a session, and hands its answers to whom they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from streamdiff.engine.messages import Command, Data, Refused, Save, Saved
from streamdiff.errors import RequestError


class SnapshotRequests:
    """Those of one session. Lives on the event loop."""

    def __init__(self, session: str, send: Callable[[Command], Awaitable[None]]) -> None:
        self._session, self._send = session, send
        self._numbers = count(1)
        self._asked: dict[str, asyncio.Future[Data]] = {}

    async def save(self, timeout_s: float) -> Data:
        """A snapshot's file as it would be on disk, taken now; the session goes on.

        Raises:
            RequestError: the engine cannot take one; says why.
            EngineFailure: the engine has ended.
            TimeoutError: it did not answer in time.
        """
        request = f"save {next(self._numbers)}"
        answer: asyncio.Future[Data] = asyncio.get_running_loop().create_future()
        self._asked[request] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(Save(self._session, request))
                return await answer
        finally:
            del self._asked[request]

    def take(self, event: Saved | Refused) -> bool:
        """Whether the event was an answer that somebody has waited for here. Mutates: self."""
        if (answer := self._asked.get(event.request)) is None:
            return isinstance(event, Saved)  # who asked has gone
        if not answer.done():
            if isinstance(event, Saved):
                answer.set_result(event.data)
            else:
                answer.set_exception(RequestError(event.field, event.reason, event.code))
        return True

    def fail(self, error: Callable[[], Exception]) -> None:
        """Raise an error in all who wait. Mutates: self."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error())
