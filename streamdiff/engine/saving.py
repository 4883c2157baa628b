"""Sessions that are to be saved: one after the other comes to rest, is copied, and goes on; others go on meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamdiff.engine.messages import Event, Save, Saved
from streamdiff.engine.session import Session
from streamdiff.engine.swapping import Swapping
from streamdiff.engine.validation import refused
from streamdiff.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline


class SaveQueue:
    """`Save` commands of an engine, each of which is answered by `Saved` or `Refused`."""

    def __init__(self, pipeline: StreamingPipeline, swapping: Swapping, sessions: Mapping[str, Session]) -> None:
        """`sessions` are the engine's, by name."""
        self._pipeline, self._swapping, self._sessions = pipeline, swapping, sessions
        self.queue: deque[Save] = deque()
        """The first is under way."""
        self._ticket: int | None = None  # of the first one, when it is copied
        self.dropped: set[int] = set()
        """Tickets of sessions that ended meanwhile: their results are discarded. While there are any, or some wait in
        the queue, `advance` has work."""

    def ask(self, command: Save) -> None:
        """Queue a save, of a session that can be saved. Mutates: self."""
        self.queue.append(command)

    def advance(self) -> list[Event]:
        """Go on with the first one; returns the answers of those that are finished. Mutates: self, pipeline."""
        events: list[Event] = []
        for ticket, made in self._pipeline.saving.take_done():
            self.dropped.discard(ticket)
            if ticket == self._ticket:
                self._ticket = None
                events.append(self._answer(made))
        if self.queue and self._ticket is None:
            session = self._sessions[self.queue[0].session]
            if self._may_begin(session) and self._pipeline.saving.comes_to_rest(session.slot):
                try:
                    self._ticket = self._pipeline.saving.begin(session.slot, _file_of(session))
                except ConfigError as error:
                    events.append(self._answer(error))
        return events

    def forget(self, name: str) -> list[Save]:
        """The session has ended; returns its commands that are not answered. Mutates: self."""
        saves = [command for command in self.queue if command.session == name]
        if saves and saves[0] is self.queue[0] and self._ticket is not None:
            self.dropped.add(self._ticket)
            self._ticket = None
        self.queue = deque(command for command in self.queue if command.session != name)
        return saves

    def _answer(self, made: Any) -> Event:
        """The answer to the first save: a snapshot file's content, or the ConfigError that prevented it. Mutates:
        self."""
        command = self.queue.popleft()
        self._swapping.release(self._sessions[command.session].slot)
        if isinstance(made, ConfigError):
            return refused(command, RequestError("session", str(made)))
        return Saved(command.session, command.request, made)

    def _may_begin(self, session: Session) -> bool:
        """Whether all that was accepted is applied, or can be at once. A session that is swapped out with changes to
        apply comes back first: its stages have none of it. Mutates: self."""
        if self._pipeline.swapping.is_away(session.slot) and session.changes:
            self._swapping.hold(session.slot)
            return False
        return True


def _file_of(session: Session) -> Callable[[Any], bytes]:
    """What makes a file's content of the snapshot of a session that is at rest. Mutates: the session."""
    session.apply_pending()
    about, given = {"session": session.saved()}, (session.start, session.embeddings)
    return lambda snapshot: replace(snapshot, about=about).with_given(*given).to_bytes()
