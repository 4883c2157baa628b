"""Sessions that come to rest: those to save, one after the other, each of which then continues; and those without
viewers, whose caches leave the device where memory is short.

Sans-IO, and without a clock: the web process says which sessions are active (`SetActive`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from streamdiff.engine.messages import Event, Save, Saved, SetActive, Swapped
from streamdiff.engine.session import Session
from streamdiff.engine.validation import refused
from streamdiff.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

_T = TypeVar("_T")


class SaveAndSwapQueue:
    """What an engine saves, and swaps, of the sessions of its pipeline."""

    def __init__(self, pipeline: StreamingPipeline, in_slot: Mapping[int, Session]) -> None:
        self._ring, self._in_slot = pipeline.resting, in_slot
        self.saves: deque[tuple[Save, Session]] = deque()
        """Those to save; the first is under way."""
        self._ticket: int | None = None  # of the first one, when it is copied
        self._idle: dict[int, bool] = {}  # those that nobody needs, longest first; whether to be swapped out at once
        self._called: dict[int, None] = {}  # those that are to come back, longest first
        self._locations: dict[int, str] = {}  # as they were told last; of those that are not on the device

    def advance(self) -> list[Event]:
        """Swap sessions in and out, and save the next one; returns what has become of them. Streams whose caches are
        lost restart. Mutates: self, pipeline."""
        events: list[Event] = []
        if self._idle or self._called or self._locations or self._ring.away:
            self._swap()
            events += self._moved()
            events += [event for slot in self._ring.lost for event in self._in_slot[slot].reset(None, "")]
        return events + self._save() if self.saves or self._ring.savings else events

    def forget(self, session: Session) -> list[Save]:
        """The session has ended; returns the commands to save it that are not answered. Mutates: self."""
        for each in (self._idle, self._called, self._locations):
            each.pop(session.slot, None)
        own = [command for command, whose in self.saves if whose is session]
        if own and own[0] is self.saves[0][0]:
            self._ticket = None
        self.saves = deque(each for each in self.saves if each[1] is not session)
        return own

    # ---- swapping -----------------------------------------------------------------------------------------------

    def set_active(self, slot: int, message: SetActive) -> None:
        """Note whether a session is active; `advance` swaps it in or out. Mutates: self."""
        if not message.active:
            self._idle[slot] = message.swap_out
            self._called.pop(slot, None)
        else:
            self._idle.pop(slot, None)
            if self._ring.is_away(slot):
                self._called[slot] = None

    def swap_in(self, slot: int) -> None:
        """Swap a session in if it is away, others out for it. Raises RequestError as `retry_after_swap_out`. Mutates:
        pipeline."""
        if self._ring.is_away(slot):
            self.retry_after_swap_out(lambda: self._ring.swap_in(slot), slot)

    def retry_after_swap_out(self, call: Callable[[], _T], returning: int | None = None) -> _T:
        """Run `call`, which takes memory for a new session or the one `returning`; while there is too little, swap
        out the longest idle session and retry.

        Raises:
            RequestError: as `call`; code "memory" where all that fit are needed.
        """
        while True:
            try:
                return call()
            except RequestError as error:
                idle = next((slot for slot in self._idle if self._ring.can_swap_out(slot, returning)), None)
                if error.code != "memory" or idle is None:
                    raise
                self._ring.swap_out(idle)

    def _swap(self) -> None:
        """Swap sessions in and out. Mutates: self, pipeline."""
        for slot in list(self._called):
            try:
                self.swap_in(slot)
            except RequestError:
                break  # all that fit are needed; it waits
            del self._called[slot]
        for slot, at_once in self._idle.items():
            if at_once and self._ring.at_rest(slot) and self._ring.can_swap_out(slot):
                self._ring.swap_out(slot)

    def _moved(self) -> list[Event]:
        """Sessions whose caches have moved since the last call, and their location: device, host or disk. Mutates:
        self."""
        now = {slot: self._ring.place(slot) for slot in {*self._idle, *self._locations}}
        moved = [(slot, location) for slot, location in now.items() if location != self._locations.get(slot, "device")]
        self._locations = {slot: location for slot, location in now.items() if location != "device"}
        return [Swapped(self._in_slot[slot].name, location) for slot, location in moved]

    # ---- saving -------------------------------------------------------------------------------------------------

    def _save(self) -> list[Event]:
        """Continue with the first one to save; returns the answers of those that are finished. Mutates: self,
        pipeline."""
        events: list[Event] = []
        for ticket, made in self._ring.take_done():
            if ticket == self._ticket:  # else its session has ended meanwhile
                self._ticket = None
                events.append(self._answer(made))
        if self.saves and self._ticket is None:
            session = self.saves[0][1]
            if session.changes and self._ring.is_away(session.slot):
                self._called[session.slot] = None  # its stages have none of them
            elif self._ring.comes_to_rest(session.slot):
                try:
                    self._ticket = self._ring.save(session.slot, _file_of(session))
                except ConfigError as error:
                    events.append(self._answer(error))
        return events

    def _answer(self, made: Any) -> Event:
        """The answer to the first command: a snapshot file's content, or the ConfigError that prevented it. Mutates:
        self."""
        command, _ = self.saves.popleft()
        if isinstance(made, ConfigError):
            return refused(command, RequestError("session", str(made)))
        return Saved(command.session, command.request, made)


def _file_of(session: Session) -> Callable[[Any], bytes]:
    """What makes a file's content of the snapshot of a session that is at rest. Mutates: the session."""
    session.apply_pending()
    about, start, embeddings = {"session": session.saved()}, session.start, session.embeddings
    return lambda snapshot: replace(snapshot, about=about).with_loose(start=start, prompt_embeds=embeddings).to_bytes()
