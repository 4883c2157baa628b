"""State of the engine, what callers may learn of a failure, and whether it has opened or saved a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal

from streamdiff.engine.messages import Command, Data, Refused, Save, Saved
from streamdiff.errors import RequestError

PLAIN_REASON = "it failed; who may steer is told why"
_WORDS = {
    "opening": "The session is not open yet",
    "restarting": "The engine is being started again",
    "waiting": "The session waits for memory",
    "failed": "The engine stopped",
}


@dataclass(frozen=True)
class EngineStatus:
    """State of the engine, or of a session on it: `opening`, or `waiting` for memory to be opened again. `reason`: why
    it does not run; `retry_after_s`: in how many seconds it may, as far as known.

    A reason may end with the last lines that the engine wrote: paths, addresses, what an exception held. Only callers
    that may control a session get it; others learn only that the engine failed.
    """

    state: Literal["running", "opening", "restarting", "waiting", "failed"] = "running"
    reason: str = ""
    retry_after_s: int = 1

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def code(self) -> str:
        """For programs, of an engine that does not run."""
        return {"failed": "engine", "waiting": "memory"}.get(self.state, self.state)

    def reason_for(self, may_control: bool) -> str:
        """The reason that a caller may see; empty where there is none."""
        return self.reason if may_control or not self.reason or self.state == "waiting" else PLAIN_REASON

    def message(self, may_control: bool, consequence: str = "") -> str:
        """A sentence on an engine that does not run, and why."""
        reason = self.reason_for(may_control)
        return f"{_WORDS[self.state]}{consequence}{f': {reason}' if reason else '.'}"


class Opening:
    """The engine's answer to the latest `Open` of a session. Lives on the event loop."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the last answer, before the session is opened again. Mutates: self."""
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pending(self) -> bool:
        """Whether the engine has not answered yet."""
        return not self._answer.done()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the engine has opened it.

        Raises:
            RequestError: it refused; EngineFailure: it has ended; TimeoutError: it did not answer in time.
        """
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._answer)

    def end(self, error: Exception | None) -> None:
        """The engine has opened it, or not. Mutates: self."""
        if self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)
            self._answer.exception()  # marks it retrieved: there may be no waiter


class SnapshotRequests:
    """Requests snapshots of a session from the engine, and matches answers to requests. Lives on the event loop."""

    def __init__(self, session: str, send: Callable[[Command], Awaitable[None]]) -> None:
        self._session, self._send = session, send
        self._numbers = count(1)
        self._pending: dict[str, asyncio.Future[Data]] = {}

    async def save(self, timeout_s: float) -> Data:
        """A snapshot's file as it would be on disk, taken now; the session goes on.

        Raises:
            RequestError: the engine cannot take one; says why.
            EngineFailure: the engine has ended.
            TimeoutError: it did not answer in time.
        """
        request = f"save {next(self._numbers)}"
        answer: asyncio.Future[Data] = asyncio.get_running_loop().create_future()
        self._pending[request] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(Save(self._session, request))
                return await answer
        finally:
            del self._pending[request]

    def take(self, event: Saved | Refused) -> bool:
        """Take the answer to a request made here; False if it is the answer to another one. Mutates: self."""
        if (answer := self._pending.get(event.request)) is None:
            return isinstance(event, Saved)  # of a request that was given up
        if not answer.done():
            if isinstance(event, Saved):
                answer.set_result(event.data)
            else:
                answer.set_exception(RequestError(event.field, event.reason, event.code))
        return True

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail all pending requests with an error. Mutates: self."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error())
