"""Sessions to save: one after the other comes to rest, is copied, and continues; others play meanwhile."""

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

    def ask(self, command: Save) -> None:
        """Queue a save, of a session that can be saved. Mutates: self."""
        self.queue.append(command)

    def advance(self) -> list[Event]:
        """Continue with the first one; returns the answers of those that are finished. Mutates: self, pipeline."""
        events: list[Event] = []
        for ticket, made in self._pipeline.resting.take_done():
            if ticket == self._ticket:  # else its session has ended meanwhile
                self._ticket = None
                events.append(self._answer(made))
        if self.queue and self._ticket is None:
            session = self._sessions[self.queue[0].session]
            if session.changes and self._pipeline.resting.is_away(session.slot):
                self._swapping.call(session.slot)  # its stages have none of them
            elif self._pipeline.resting.comes_to_rest(session.slot):
                try:
                    self._ticket = self._pipeline.resting.save(session.slot, _file_of(session))
                except ConfigError as error:
                    events.append(self._answer(error))
        return events

    def forget(self, name: str) -> list[Save]:
        """The session has ended; returns its commands that are not answered. Mutates: self."""
        saves = [command for command in self.queue if command.session == name]
        if saves and saves[0] is self.queue[0] and self._ticket is not None:
            self._ticket = None
        self.queue = deque(command for command in self.queue if command.session != name)
        return saves

    def _answer(self, made: Any) -> Event:
        """The answer to the first save: a snapshot file's content, or the ConfigError that prevented it. Mutates:
        self."""
        command = self.queue.popleft()
        if isinstance(made, ConfigError):
            return refused(command, RequestError("session", str(made)))
        return Saved(command.session, command.request, made)


def _file_of(session: Session) -> Callable[[Any], bytes]:
    """What makes a file's content of the snapshot of a session that is at rest. Mutates: the session."""
    session.apply_pending()
    about, start, embeddings = {"session": session.saved()}, session.start, session.embeddings
    return lambda snapshot: replace(snapshot, about=about).with_loose(start=start, prompt_embeds=embeddings).to_bytes()
