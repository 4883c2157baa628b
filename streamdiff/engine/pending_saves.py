"""Queue of session saves: one session after the other comes to rest, is copied, and goes on. Other sessions go on
meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from streamdiff.engine.messages import Save
from streamdiff.engine.pipeline_api import SavingPipeline
from streamdiff.errors import ConfigError

Done = tuple[Save, Any]
"""A request and its result: a snapshot file's content, or the ConfigError that prevented it."""


class PendingSaves:
    """An engine's queue of saves; the first is under way."""

    def __init__(self) -> None:
        self._queue: deque[Save] = deque()
        self._ticket: int | None = None  # of the first one, when it is copied
        self._dropped: set[int] = set()  # tickets of sessions that ended meanwhile: their results are discarded

    def __bool__(self) -> bool:
        return bool(self._queue or self._dropped)

    def ask(self, command: Save) -> None:
        """Mutates: self."""
        self._queue.append(command)

    def forget(self, session: str) -> list[Save]:
        """The session has ended; returns its requests, which remain unanswered. Mutates: self."""
        removed = [command for command in self._queue if command.session == session]
        if removed and removed[0] is self._queue[0] and self._ticket is not None:
            self._dropped.add(self._ticket)
            self._ticket = None
        self._queue = deque(command for command in self._queue if command.session != session)
        return removed

    def turn(
        self,
        pipeline: SavingPipeline,
        slot_of: Callable[[str], int],
        may_begin: Callable[[str], bool],
        about: Callable[[str], Callable[[Any], Any]],
    ) -> list[Done]:
        """Advance the queue; returns finished saves. None begins before `may_begin(session)`. `about(session)`, called
        while it is at rest, returns the function that makes a file's content of its snapshot, on another thread.
        Mutates: self, pipeline."""
        done: list[Done] = []
        for ticket, made in pipeline.take_saved():
            self._dropped.discard(ticket)
            if ticket == self._ticket:
                done.append((self._queue.popleft(), made))
                self._ticket = None
        if self._queue and self._ticket is None:
            command = self._queue[0]
            slot = slot_of(command.session)
            if may_begin(command.session) and pipeline.comes_to_rest(slot):
                try:
                    self._ticket = pipeline.begin_save(slot, about(command.session))
                except ConfigError as error:
                    done.append((self._queue.popleft(), error))
        return done
