"""Who holds which control of a session, until they let go, leave, or are not heard from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from streamdiff import clock
from streamdiff.engine.messages import Command, SetControls
from streamdiff.errors import EngineFailure
from streamdiff.server.tasks import wait_at_most

SILENCE_S = 1.0
"""After so long without a message, what somebody holds is let go: clients say it again while keys are held."""


@dataclass
class ControlHolders:
    """Controls that do not rest, by name: who set each last, and by peer when it was heard from. Sans-IO."""

    holders: dict[str, str] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)

    def hold(self, peer: str, values: Mapping[str, float], now_s: float) -> None:
        """A peer sets controls; the newest value of each counts, from any peer. Mutates: self."""
        self.heard_s[peer] = now_s
        for name, value in values.items():
            if value:
                self.holders[name] = peer
            else:
                self.holders.pop(name, None)
        self._forget_idle()

    def leave(self, peer: str) -> None:
        """A peer is gone: what it holds is to be let go. Mutates: self."""
        if peer in self.heard_s:
            self.heard_s[peer] = float("-inf")

    def next_s(self) -> float | None:
        """When what somebody holds is to be let go, if nothing is heard; None: nobody holds anything."""
        return min((self.heard_s[peer] + SILENCE_S for peer in self.holders.values()), default=None)

    def let_go(self, now_s: float) -> dict[str, float]:
        """The controls, at rest, of those that have not been heard from. Mutates: self."""
        silent = {name: 0.0 for name, peer in self.holders.items() if now_s - self.heard_s[peer] >= SILENCE_S}
        for name in silent:
            del self.holders[name]
        self._forget_idle()
        return silent

    def _forget_idle(self) -> None:
        holding = set(self.holders.values())
        self.heard_s = {peer: heard_s for peer, heard_s in self.heard_s.items() if peer in holding}


class Steering:
    """The controls of one session: what peers hold goes to the engine, and is let go for those that leave."""

    def __init__(self, session: str, send: Callable[[Command], Awaitable[None]]) -> None:
        self._session, self._send = session, send
        self._held, self._left = ControlHolders(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether anybody has steered the session."""
        return self._task is not None

    async def hold(self, peer: str, values: Mapping[str, float], request: str) -> None:
        """Have the engine hold these values for a peer; `request` as in `SetControls`. Mutates: self.

        Raises:
            EngineFailure: the engine has ended.
        """
        self._held.hold(peer, values, clock.monotonic_s())
        if self._task is None:
            self._task = asyncio.create_task(self._let_go(), name=f"controls-{self._session}")
        await self._send(SetControls(self._session, dict(values), request))

    def leave(self, peer: str) -> None:
        """A peer is gone. Mutates: self."""
        self._held.leave(peer)
        self._left.set()

    def forget(self) -> None:
        """The engine has ended; the next one holds nothing. Mutates: self."""
        self._held = ControlHolders()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _let_go(self) -> None:
        """Let controls go whose holders leave or fall silent, for ever."""
        while True:
            next_s = self._held.next_s()
            self._left.clear()
            await wait_at_most(self._left, SILENCE_S if next_s is None else max(0.0, next_s - clock.monotonic_s()))
            if released := self._held.let_go(clock.monotonic_s()):
                with suppress(EngineFailure):
                    await self._send(SetControls(self._session, released))
