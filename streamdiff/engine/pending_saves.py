"""Saves that were asked for: one session after the other comes to rest, is copied, and goes on; nobody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from streamdiff.engine.messages import Save
from streamdiff.engine.pipeline_api import SavingPipeline
from streamdiff.errors import ConfigError

Done = tuple[Save, Any]
"""A request, and what it came to: a file's content, or the ConfigError for which there is none."""


class PendingSaves:
    """An engine's queue of saves; the first is under way."""

    def __init__(self) -> None:
        self._asked: deque[Save] = deque()
        self._ticket: int | None = None  # of the first one, when it is copied
        self._dropped: set[int] = set()  # tickets of sessions that ended meanwhile: to be taken, and thrown away

    def __bool__(self) -> bool:
        return bool(self._asked or self._dropped)

    def ask(self, command: Save) -> None:
        """Mutates: self."""
        self._asked.append(command)

    def forget(self, session: str) -> list[Save]:
        """The session has ended; returns the requests that have no answer now. Mutates: self."""
        gone = [command for command in self._asked if command.session == session]
        if gone and gone[0] is self._asked[0] and self._ticket is not None:
            self._dropped.add(self._ticket)
            self._ticket = None
        self._asked = deque(command for command in self._asked if command.session != session)
        return gone

    def turn(
        self, pipeline: SavingPipeline, slot_of: Callable[[str], int], about: Callable[[str], Callable[[Any], Any]]
    ) -> list[Done]:
        """Advance; returns finished saves. `about(session)`, called at rest, makes what a thread applies to its
        snapshot. Mutates: self, pipeline."""
        done: list[Done] = []
        for ticket, made in pipeline.take_saved():
            self._dropped.discard(ticket)
            if ticket == self._ticket:
                done.append((self._asked.popleft(), made))
                self._ticket = None
        if self._asked and self._ticket is None:
            command = self._asked[0]
            slot = slot_of(command.session)
            if pipeline.comes_to_rest(slot):
                try:
                    self._ticket = pipeline.begin_save(slot, about(command.session))
                except ConfigError as error:
                    done.append((self._asked.popleft(), error))
        return done
