"""Who has the wheel of a session that many watch, who waits for it, and words that nobody may say there.

While nobody has it, all who may steer do.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamdiff import clock
from streamdiff.config import ServeConfig
from streamdiff.server.auth import read_setting_file
from streamdiff.server.sessions import control
from streamdiff.server.sessions.control import ControlError, Id, WheelMessage
from streamdiff.server.tasks import wait_at_most

MAX_WAITING = 32
MAX_UNCONNECTED = 4
"""Of those who have the wheel or wait for it, from one address, without a connection."""
TOLD_S = 0.1
"""Watchers hear of changes no more often than that."""


@dataclass(eq=False)
class Watcher:
    """Who may have the wheel: a connection, by its name `peer`, or a client without one, which shows its `token`."""

    id: int
    name: str
    may_steer: bool
    peer: str = ""
    address: str = ""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    heard_s: float = 0.0

    def public(self) -> dict[str, Any]:
        """What all may know, JSON-able."""
        return {"id": self.id, "name": self.name}


class WheelQueue:
    """The holder of a wheel and those who wait for it, in their order. Sans-IO; the caller gives the time."""

    def __init__(self, idle_s: float) -> None:
        """`idle_s`: who is not heard for so long loses the wheel, or, without a connection, the place in the queue."""
        self.idle_s = idle_s
        self.line: list[Watcher] = []
        """The holder, and then those who wait."""

    @property
    def holder(self) -> Watcher | None:
        """Who has the wheel."""
        return self.line[0] if self.line else None

    def enter(self, watcher: Watcher, now_s: float) -> bool:
        """Have the wheel, or a place in the queue; False where there is none. Mutates: self, watcher."""
        if watcher not in self.line:
            alike = sum(not (each.peer or watcher.peer) and each.address == watcher.address for each in self.line)
            if len(self.line) > MAX_WAITING or alike >= MAX_UNCONNECTED:
                return False
            watcher.heard_s = now_s
            self.line.append(watcher)
        return True

    def put_first(self, watcher: Watcher, now_s: float) -> None:
        """Have the wheel instead of who has it, who has no place then. Mutates: self, watcher."""
        watcher.heard_s = now_s
        self.line = [watcher, *(each for each in self.line[1:] if each is not watcher)]

    def leave(self, now_s: float, *watchers: Watcher) -> None:
        """Give up the wheel, which the next in the queue gets, or a place. Mutates: self, the next."""
        before = self.holder
        self.line = [each for each in self.line if each not in watchers]
        if self.holder is not None and self.holder is not before:
            self.holder.heard_s = now_s

    def end_idle(self, now_s: float) -> float | None:
        """Those who were not heard lose their places; a connection speaks for who waits. Returns when to look again;
        None: nobody has a place. Mutates: self, those who have one."""
        for each in self.line[1:]:
            each.heard_s = now_s if each.peer else each.heard_s
        self.leave(now_s, *(each for each in self.line if now_s - each.heard_s >= self.idle_s))
        return min((each.heard_s + self.idle_s for each in self.line), default=None)


class BlockedWords:
    """Words and phrases that neither prompts nor names may have, of the file `serve.blocked_words`: one a line, `#`
    before a remark. Case, width and invisible characters do not count; a word is blocked as a whole, `*` at its end or
    beginning stands for more letters."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError for a file that cannot be read."""
        path = config.blocked_words
        lines = [] if path is None else _plain(read_setting_file(path, "serve.blocked_words")).splitlines()
        words = [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]
        either = "|".join(re.escape(word).replace(r"\*", r"\w*") for word in words)
        self._pattern = re.compile(rf"(?<!\w)(?:{either})(?!\w)") if words else None

    def check(self, text: str, field: str, id: Id = None) -> None:
        """Raises ControlError for a text with one of them. The answer does not repeat it."""
        if self._pattern is not None and self._pattern.search(_plain(text)):
            raise ControlError("blocked_word", f"`{field}` has a word that this server does not take.", field, id)


def _plain(text: str) -> str:
    """The text as words are compared."""
    known = (each for each in unicodedata.normalize("NFKC", text) if unicodedata.category(each) != "Cf")
    return "".join(known).casefold()


class Wheel:
    """The wheel of one session: who may steer now. Tells watchers of changes; who is idle loses it. Lives on the event
    loop."""

    def __init__(self, session: str, idle_s: float, words: BlockedWords, tell: Callable[[Any], None]) -> None:
        """`tell` sends a message to all that watch."""
        self._session, self._words, self._tell = session, words, tell
        self._queue, self.open = WheelQueue(idle_s), False
        """`open`: whether who may only watch may take it too."""
        self._connected: dict[str, Watcher] = {}
        """By token."""
        self._count, self._changed = itertools.count(1), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ---- who is who ---------------------------------------------------------------------------------------------

    def new(self, may_steer: bool, peer: str = "", address: str = "") -> Watcher:
        """Somebody new, whom `find` finds while connected or in the queue. Mutates: self."""
        watcher = Watcher(number := next(self._count), f"guest {number}", may_steer, peer, address)
        if peer:
            self._connected[watcher.token] = watcher
        return watcher

    def gone(self, watcher: Watcher) -> None:
        """A connection has ended. Mutates: self."""
        del self._connected[watcher.token]
        self._queue.leave(clock.monotonic_s(), watcher)
        self._changed.set()

    def find(self, token: str) -> Watcher | None:
        """Who has this token; one that waits is heard by that. Mutates: the watcher."""
        watcher = self._connected.get(token) or next((each for each in self._queue.line if each.token == token), None)
        if watcher is not None and not self.holds(watcher):
            watcher.heard_s = clock.monotonic_s()
        return watcher

    def holds(self, watcher: Watcher | None) -> bool:
        """Whether somebody has the wheel."""
        return watcher is not None and watcher is self._queue.holder

    def place(self, watcher: Watcher) -> int | None:
        """0: has the wheel; 1: is next; None: does not wait."""
        return self._queue.line.index(watcher) if watcher in self._queue.line else None

    def state(self) -> dict[str, Any]:
        """What all who watch may know, JSON-able."""
        line = [each.public() for each in self._queue.line]
        return {"holder": line[0] if line else None, "queue": line[1:], "open": self.open}

    def watchers(self) -> list[dict[str, Any]]:
        """All that are connected, as `state` has them."""
        return [each.public() for each in self._connected.values()]

    # ---- what they may do ---------------------------------------------------------------------------------------

    def check(self, message: control.ControlMessage, watcher: Watcher | None) -> None:
        """Check that a caller, None: unknown here, may say a message now; a holder is heard by that.

        Raises:
            ControlError: somebody else has the wheel, or a prompt has a word that is blocked.
        """
        if isinstance(message, control.PromptMessage):
            self._words.check(message.prompt, "prompt", message.id)
        if isinstance(message, control.ChangeMessage):
            self.check_holder(watcher, message.id)

    def check_holder(self, watcher: Watcher | None, id: Id = None) -> None:
        """`check` of a request that steers without a message."""
        holder = self._queue.holder
        if holder is not None and holder is not watcher:
            how = f'POST {{"do": "take"}} to /api/sessions/{self._session}/wheel, or send it with type wheel'
            why = f"{holder.name} has the wheel and steers alone. To wait for it, {how}."
            raise ControlError("wheel", why, id=id)
        if holder is not None:
            holder.heard_s = clock.monotonic_s()

    def carry_out(self, message: WheelMessage, watcher: Watcher, owner: bool = False) -> Watcher:
        """Do what a watcher asks for; `owner`: who showed that the session is theirs. Returns whom it is about: the
        caller ends the connection of one that is to be removed. Mutates: self.

        Raises:
            ControlError: it may not, all places are taken, a name that is blocked or somebody else's, nobody of that
                number. Nothing has changed.
        """
        now_s, queue, do = clock.monotonic_s(), self._queue, message.do
        if not (owner or do == "give_up" or (do == "take" and (watcher.may_steer or self.open))):
            why = "This takes a control token, over HTTP; `take`: or that the owner opens the wheel to all who watch."
            raise ControlError("forbidden", why, "do", message.id)
        about = self._find(message) if do in ("pass", "remove") else watcher
        name = message.name or watcher.name
        self._words.check(name, "name", message.id)
        if _plain(name) in (_plain(each.name) for each in queue.line if each is not watcher):
            raise ControlError("name_taken", "Somebody in the queue has this name.", "name", message.id)
        match do:
            case "take" if not queue.enter(watcher, now_s):
                raise ControlError("queue_full", "All places are taken.", "", message.id, {"Retry-After": "10"})
            case "give_up" | "remove":
                queue.leave(now_s, about)
            case "take_back" | "pass":
                queue.put_first(about, now_s)
            case "open" | "close":
                self.open = do == "open"
                queue.leave(now_s, *(each for each in queue.line if not (self.open or each.may_steer)))
        watcher.name = name
        self._task = self._task or asyncio.create_task(self._run(), name=f"wheel-{self._session}")
        self._changed.set()
        return about

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _find(self, message: WheelMessage) -> Watcher:
        """Whom a message is about."""
        for each in (*self._connected.values(), *self._queue.line):
            if each.id == message.watcher:
                return each
        raise ControlError("unknown_watcher", "Nobody who watches has this number.", "watcher", message.id)

    async def _run(self) -> None:
        """Take places from the idle, and tell all who watch of changes, for ever."""
        told: dict[str, Any] = {}
        while True:
            next_s = self._queue.end_idle(clock.monotonic_s())
            if (state := self.state()) != told:
                self._tell({"type": "wheel", **state})
                told = state
                await asyncio.sleep(TOLD_S)
            await wait_at_most(self._changed, None if next_s is None else max(0.0, next_s - clock.monotonic_s()))
            self._changed.clear()
