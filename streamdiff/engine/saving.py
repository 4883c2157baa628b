"""Saving an engine's sessions, and opening sessions from snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from streamdiff.engine.messages import Close, Event, Open, Save, Saved
from streamdiff.engine.open_sessions import OpenSessions
from streamdiff.engine.pipeline_api import Pipeline
from streamdiff.engine.prompt_queue import NOTHING, Encoded, PendingRequest
from streamdiff.engine.session import Session, possible_switches
from streamdiff.engine.validation import closed_before, refused
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.snapshot_header import read_saved_session


class SavingEngine(OpenSessions, ABC):
    """An engine's sessions, saved and opened from snapshots. Saves are queued: one session after the other comes to
    rest, is copied, and goes on; other sessions go on meanwhile."""

    def __init__(self, pipeline: Pipeline, max_ahead_frames: int) -> None:
        super().__init__(pipeline, max_ahead_frames)
        self._saves: deque[Save] = deque()  # the first is under way
        self._save_ticket: int | None = None  # of the first one, when it is copied
        self._dropped_saves: set[int] = set()  # tickets of sessions that ended meanwhile: their results are discarded

    @abstractmethod
    def _wait(self, pending: PendingRequest) -> list[Event]:
        """Queue a request whose prompt or picture must be encoded first."""

    @abstractmethod
    def _open_now(self, command: Open, reading: ParsedPrompt, made: Encoded = NOTHING) -> list[Event]:
        """Open a session of which everything is encoded."""

    def save(self, name: str) -> tuple[Any, list[Event]]:
        """A snapshot of a session, and what came before it was taken. Its `about` has the session's text, epoch and
        frame numbers; prompts that have been accepted are in it.

        Raises:
            RequestError: no such session, or a prompt of it is being encoded.
            ConfigError: its noise was given as tensors.
        """
        session = self._check_saved(name)
        if self._pipeline.is_away(self._slots[name]) and session.changes:
            why = f"session {name!r} is swapped out with changes that are not applied; let it play, then save it"
            raise RequestError("session", why)
        session.apply_pending()
        snapshot, frames = self._pipeline.save(self._slots[name])
        events = [event for made in frames for event in self._number(made)]
        about = {"session": session.saved()}
        return replace(snapshot, about=about).with_given(session.start, session.embeddings), events

    def _check_saved(self, name: str) -> Session:
        """A session that can be saved now. Raises RequestError."""
        session = self._find(Close(name))
        assert session is not None, "`_find` raises"
        if name in self._prompt_queue:
            why = f"a prompt of session {name!r} is being encoded; save it when it is accepted"
            raise RequestError("session", why, "encoding")
        return session

    def load(self, name: str, snapshot: Any) -> list[Event]:
        """Open session `name` as a snapshot has it; its frames go on being numbered.

        Raises:
            RequestError: the id is taken, or the snapshot does not fit; nothing is open then.
        """
        session, events = self._load(name, snapshot, self._max_ahead_frames)
        return session.open("", possible_switches(self._pipeline, self._slots[name])) + events

    def _load(self, name: str, snapshot: Any, max_ahead_frames: int) -> tuple[Session, list[Event]]:
        """A session that goes on from a snapshot, with no frames allowed yet, and what others made meanwhile."""
        self._check_unused(name)
        saved, opened = snapshot.about.get("session"), snapshot.session
        if not isinstance(saved, dict):
            raise RequestError(
                "snapshot", "the snapshot tells nothing of the engine's session; it was not saved by one"
            )
        slot = self._free_slot()
        steps, kv_context, epoch = opened["steps"], opened["kv_context"], opened["epoch"]
        session = Session(
            name, self._pipeline, slot, partial(self._encoded, name), text="", seed=0, kv_context=kv_context,
            epoch=epoch, max_ahead_frames=max_ahead_frames,
            min_ahead_frames=self._min_ahead_frames(steps, kv_context),
        )  # fmt: skip
        session.restore(saved)
        start, embeddings = snapshot.given()
        if not session.text and embeddings is None:
            raise RequestError("snapshot", "about.session.text is empty in the snapshot, and it has no prompt_embeds")
        frames = self._swapping.retry_after_swap_out(lambda: self._pipeline.load(slot, snapshot))
        session.start, session.embeddings = start, embeddings
        self._slots[name], self._sessions[slot] = slot, session
        return session, [event for made in frames for event in self._number(made)]

    def _text_to_encode(self, session: Session | None) -> str:
        """A session's text, if encoding is slow and nothing has encoded it yet, as after a snapshot; else empty."""
        if session is None or session.embeddings is not None or session.name in self._prompt_queue:
            return ""
        encoded = self._texts.get(session.name, ("",))[0] == session.text
        return session.text if self._pipeline.text.slow and not encoded else ""

    def _save(self, command: Save) -> list[Event]:
        """Queue a save, which `_turn_saves` answers."""
        self._check_saved(command.session)
        self._saves.append(command)
        return []

    def _turn_saves(self) -> list[Event]:
        """Advance the queue of saves; returns the answers of those that are finished. Mutates: self, pipeline."""
        events: list[Event] = []
        for ticket, made in self._pipeline.take_saved():
            self._dropped_saves.discard(ticket)
            if ticket == self._save_ticket:
                self._save_ticket = None
                events.append(self._saved(made))
        if self._saves and self._save_ticket is None:
            slot = self._slots[self._saves[0].session]
            if self._may_begin_save(slot) and self._pipeline.comes_to_rest(slot):
                try:
                    self._save_ticket = self._pipeline.begin_save(slot, self._file_of(slot))
                except ConfigError as error:
                    events.append(self._saved(error))
        return events

    def _saved(self, made: Any) -> Event:
        """The answer to the first save: a snapshot file's content, or the ConfigError that prevented it. Mutates:
        self."""
        command = self._saves.popleft()
        self._swapping.release(self._slots[command.session])
        if isinstance(made, ConfigError):
            return refused(command, RequestError("session", str(made)))
        return Saved(command.session, command.request, made)

    def _close(self, name: str) -> list[Event]:
        ended = super()._close(name)
        saves = [command for command in self._saves if command.session == name]
        if saves and saves[0] is self._saves[0] and self._save_ticket is not None:
            self._dropped_saves.add(self._save_ticket)
            self._save_ticket = None
        self._saves = deque(command for command in self._saves if command.session != name)
        return [*map(closed_before, saves), *ended]

    def _may_begin_save(self, slot: int) -> bool:
        """Whether all that was accepted is applied, or can be at once. A session that is swapped out with changes to
        apply comes back first: its stages have none of it. Mutates: self."""
        if self._pipeline.is_away(slot) and self._sessions[slot].changes:
            self._swapping.hold(slot)
            return False
        return True

    def _file_of(self, slot: int) -> Callable[[Any], bytes]:
        """What makes a file's content of the snapshot of a session that is at rest. Mutates: the session."""
        session = self._sessions[slot]
        session.apply_pending()
        about, given = {"session": session.saved()}, (session.start, session.embeddings)
        return lambda snapshot: replace(snapshot, about=about).with_given(*given).to_bytes()

    def _open_saved(self, command: Open) -> list[Event]:
        """Open a session that goes on; first its new prompt and picture are encoded, if it has any."""
        if command.background:
            raise RequestError("snapshot", "a background session does not go on from a snapshot; open it without")
        assert command.snapshot is not None
        try:
            saved = read_saved_session(command.snapshot)
        except ConfigError as error:
            raise RequestError("snapshot", str(error)) from error
        reading = self._read(command.prompt, None) if command.prompt else ParsedPrompt(saved.text, "")
        if command.image is not None or (reading.text != saved.text and self._pipeline.text.slow):
            return self._wait(PendingRequest(command, reading.text, reading.notice))
        return self._open_now(command, reading)

    def _go_on(self, command: Open, reading: ParsedPrompt, start: Any) -> list[Event]:
        """Open a session that goes on from a snapshot, with what has been changed since. `start`: see `Session`."""
        assert command.snapshot is not None
        try:
            snapshot = self._pipeline.read_snapshot(command.snapshot)
        except ConfigError as error:
            raise RequestError("snapshot", str(error)) from error
        ahead = self._max_ahead_frames if command.max_ahead_frames is None else command.max_ahead_frames
        session, events = self._load(command.session, snapshot, ahead)
        slot = self._slots[command.session]
        new_text, new_steps = reading.text != session.text, command.steps not in (None, snapshot.steps)
        session.start = session.start if start is None else start
        session.renumber(command.epoch - new_text - new_steps, command.made_frames, command.shown_frames)
        switches = possible_switches(self._pipeline, slot)
        if new_text:
            session.set_prompt(reading.text, reading.notice, "", next(each for each in switches if each != "reset"))
        if new_steps and command.steps is not None:
            try:
                self._pipeline.check_steps(slot, command.steps)
            except RequestError:
                self._close(command.session)
                raise
            session.set_steps(command.steps, self._min_ahead_frames(command.steps, session.kv_context), "")
        return events + session.open(reading.notice, switches)
