"""Sessions that come to rest: those to save, one after the other, each of which then continues, also by themselves, so
that they can be rewound; and those without viewers, whose caches leave the device where memory is short.

Sans-IO, and without a clock: the web process says which sessions are active (`SetActive`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from streamdiff.engine.change_log import KeptPlace
from streamdiff.engine.messages import Event, Kept, Save, Saved, SetActive, Swapped
from streamdiff.engine.session import Session
from streamdiff.engine.validation import refused
from streamdiff.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

_T = TypeVar("_T")
KEEP_S = 2.0
"""Seconds of a stream from one snapshot that is kept of it to the next, at least."""


class KeptSnapshots:
    """The kept snapshots of all sessions, of at most `limit` bytes: the oldest go first. One of a stream is taken every
    `chunks` chunks."""

    def __init__(self, limit: int, chunks: int) -> None:
        self.limit, self._chunks = limit, chunks
        self._kept: list[KeptPlace] = []
        self._told: dict[str, tuple[int, int] | None] = {}
        self._streams: list[object] = []  # of the sessions, as they were at the last `news`
        self._changed = False  # since then

    def is_due(self, session: Session, chunk: int, rests: bool) -> bool:
        """Whether one is to be taken of a session whose next chunk this is: later of one that does not rest by itself,
        as its next chunk has to wait for that."""
        _, latest = self._chunks_of(session) or (0, 0)
        return chunk >= latest + self._chunks * (1 if rests else 2)

    def add(self, kept: KeptPlace) -> None:
        """Keep one more. Mutates: self."""
        self._changed = True
        self._kept.append(kept)
        while sum(len(each.snapshot) for each in self._kept) > self.limit:
            del self._kept[0]
        if not self._kept:
            self.limit = 0  # one alone is too large, and those to come are no smaller

    def find(self, session: Session, chunk: int, next_chunk: int) -> KeptPlace:
        """The one from which a session, whose next chunk is `next_chunk`, gets to `chunk` soonest. Raises
        RequestError: there is none."""
        most = next_chunk if session.log.end is None else min(next_chunk, session.log.end[0])
        before = [each for each in self._of(session) if each.chunk <= chunk <= most]
        if before:
            return before[-1]
        kept = self._chunks_of(session)
        can = (
            "nothing of it is kept, rewind_mb is the memory for that"
            if kept is None
            else f"it can be {kept[0]} to {most}"
        )
        raise RequestError("chunk", f"chunk is {chunk}; {can}", "chunk")

    def rewound(self, session: Session, chunk: int) -> None:
        """Its chunks from this one on are made anew. Mutates: self."""
        self._changed = True
        self._kept = [each for each in self._kept if each.stream is not session.stream or each.chunk <= chunk]

    def news(self, sessions: Collection[Session]) -> list[Event]:
        """What has become of what was kept of the open sessions since the last call. Mutates: self."""
        streams = [each.stream for each in sessions]
        if streams == self._streams and not self._changed:  # nearly every step
            return []
        self._streams, self._changed = streams, False
        self._kept = [each for each in self._kept if each.stream in streams]
        told, self._told = self._told, {each.name: self._chunks_of(each) for each in sessions}
        return [Kept(name, chunks) for name, chunks in self._told.items() if chunks != told.get(name)]

    def _of(self, session: Session) -> list[KeptPlace]:
        return [each for each in self._kept if each.stream is session.stream]

    def _chunks_of(self, session: Session) -> tuple[int, int] | None:
        kept = self._of(session)
        return (kept[0].chunk, kept[-1].chunk) if kept else None


class SaveAndSwapQueue:
    """What an engine saves, and swaps, of the sessions of its pipeline."""

    def __init__(self, pipeline: StreamingPipeline, in_slot: Mapping[int, Session], keep_bytes: int = 0) -> None:
        """`keep_bytes` of snapshots are kept, at most."""
        self._ring, self._in_slot = pipeline.resting, in_slot
        info = pipeline.info
        self.kept = KeptSnapshots(keep_bytes, max(1, round(KEEP_S * info.native_fps / info.chunk_frames)))
        self.saves: deque[tuple[Save | None, Session]] = deque()
        """Those to save, without a command: to be kept; the first is under way."""
        self._ticket: int | None = None  # of the first one, when it is copied
        self._place: KeptPlace | None = None  # where that one is
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
        return self.drop_saves(session)

    def drop_saves(self, session: Session) -> list[Save]:
        """A session is not to be saved as it is now; returns the commands to save it. Mutates: self."""
        if self.saves and self.saves[0][1] is session:
            self._ticket = None
        own = [command for command, whose in self.saves if whose is session and command is not None]
        self.saves = deque(each for each in self.saves if each[1] is not session)
        return own

    def keep(self, session: Session, next_chunk: int) -> None:
        """A chunk of a session was made: have a snapshot of it kept, if it is time. Mutates: self."""
        if not self.kept.limit:
            return
        is_due = self.kept.is_due(session, next_chunk, self._ring.at_rest(session.slot)) and session.settled
        is_saved = any(whose is session for _, whose in self.saves)
        if is_due and not is_saved and self._ring.nbytes(session.slot) < self.kept.limit:
            self.saves.append((None, session))

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
                events += self._answer(made)
        if self.saves and self._ticket is None:
            command, session = self.saves[0]
            is_away = self._ring.is_away(session.slot)
            if command is None and (is_away or not session.settled):
                self.saves.popleft()  # a later one will do
                self._ring.let_go(session.slot)
            elif session.changes and is_away:
                self._called[session.slot] = None  # its stages have none of them
            elif self._ring.comes_to_rest(session.slot):
                self._place = session.place()
                try:
                    self._ticket = self._ring.save(session.slot, _file_of(session))
                except ConfigError as error:
                    events += self._answer(error)
        return events

    def _answer(self, made: Any) -> list[Event]:
        """The answer to the first command: a snapshot file's content, or the ConfigError that prevented it; what has
        no command is kept. Mutates: self."""
        command, _ = self.saves.popleft()
        if command is None:
            if not isinstance(made, ConfigError) and self._place is not None:
                self.kept.add(replace(self._place, snapshot=made))
            return []
        if isinstance(made, ConfigError):
            return [refused(command, RequestError("session", str(made)))]
        return [Saved(command.session, command.request, made)]


def _file_of(session: Session) -> Callable[[Any], bytes]:
    """What makes a file's content of the snapshot of a session that is at rest. Mutates: the session."""
    session.apply_pending()
    about, start, embeddings = {"session": session.saved()}, session.start, session.embeddings
    return lambda snapshot: replace(snapshot, about=about).with_loose(start=start, prompt_embeds=embeddings).to_bytes()
