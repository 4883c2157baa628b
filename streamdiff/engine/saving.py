"""Saving an engine's sessions, and opening sessions from snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from streamdiff.engine.messages import Close, Event, Open, Save, Saved
from streamdiff.engine.pending_saves import PendingSaves
from streamdiff.engine.pipeline_api import Pipeline, SavingPipeline
from streamdiff.engine.prompt_queue import Encoded, PendingRequest, PromptQueue, Request, has_picture
from streamdiff.engine.session import Session, possible_switches
from streamdiff.engine.snapshot_header import SavedSession, read_saved_session
from streamdiff.engine.swapping import Swapping
from streamdiff.engine.validation import refused
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.pipeline.output import Frames

NOTHING = Encoded()


class EngineSnapshotMixin(ABC):
    """Saving and loading of sessions, for `Engine`."""

    _pipeline: Pipeline
    _max_ahead_frames: int
    _slots: dict[str, int]
    _sessions: dict[int, Session]
    _prompt_queue: PromptQueue
    _swapping: Swapping
    _texts: dict[str, tuple[str, Any]]
    _saves: PendingSaves

    @abstractmethod
    def _find(self, command: Request | Close) -> Session | None:
        """The session that a command is for."""

    @abstractmethod
    def _read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        """Read a prompt; `previous`: the session's text before it, if any."""

    @abstractmethod
    def _wait(self, pending: PendingRequest) -> list[Event]:
        """Queue a request whose prompt or picture must be encoded first."""

    @abstractmethod
    def _number(self, made: Frames) -> list[Event]:
        """Decoded frames as events."""

    @abstractmethod
    def _open_now(self, command: Open, reading: ParsedPrompt, made: Encoded = NOTHING) -> list[Event]:
        """Open a session of which everything is encoded."""

    @abstractmethod
    def _close(self, name: str) -> list[Event]:
        """End a session."""

    @abstractmethod
    def _free_slot(self) -> int:
        """The lowest number that no session has."""

    @abstractmethod
    def _min_ahead_frames(self, steps: int, kv_context: str) -> int:
        """Frames that a session must be allowed to be ahead."""

    @abstractmethod
    def _encoded(self, name: str, text: str) -> Any:
        """The conditioning of a session's text."""

    def save(self, name: str) -> tuple[Any, list[Event]]:
        """A snapshot of a session, and what came before it was taken. Its `about` has the session's text, epoch and
        frame numbers; prompts that have been accepted are in it.

        Raises:
            RequestError: no such session, a prompt of it is being encoded, or the pipeline cannot save.
            ConfigError: its noise was given as tensors.
        """
        session = self._check_saved(name)
        if self._swapping.away(self._slots[name]) and session.changes:
            why = f"session {name!r} is swapped out with changes that are not applied; let it play, then save it"
            raise RequestError("session", why)
        session.apply_pending()
        snapshot, frames = self._saving().save(self._slots[name])
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
        if name in self._slots or name in self._prompt_queue:
            raise RequestError("session", f"session {name!r} is open already; close it or use another id")
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
        frames = self._swapping.retry_after_swap_out(lambda: self._saving().load(slot, snapshot))
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
        self._saving()
        self._saves.ask(command)
        return []

    def _turn_saves(self) -> list[Event]:
        """Advance pending saves; returns the answers of those that are finished."""
        if not self._saves:
            return []
        done = self._saves.turn(self._saving(), lambda name: self._slots[name], self._may_begin_save, self._file_of)
        for command, _ in done:
            self._swapping.release(self._slots[command.session])
        return [
            refused(command, RequestError("session", str(made)))
            if isinstance(made, ConfigError)
            else Saved(command.session, command.request, made)
            for command, made in done
        ]

    def _may_begin_save(self, name: str) -> bool:
        """Whether all that was accepted is applied, or can be at once. A session that is swapped out with changes to
        apply comes back first: its stages have none of it. Mutates: self."""
        slot = self._slots[name]
        if self._swapping.away(slot) and self._sessions[slot].changes:
            self._swapping.hold(slot)
            return False
        return True

    def _file_of(self, name: str) -> Callable[[Any], bytes]:
        """What makes a file's content of the snapshot of a session that is at rest. Mutates: the session."""
        session = self._sessions[self._slots[name]]
        session.apply_pending()
        about, given = {"session": session.saved()}, (session.start, session.embeddings)
        return lambda snapshot: replace(snapshot, about=about).with_given(*given).to_bytes()

    def _open_saved(self, command: Open) -> list[Event]:
        """Open a session that goes on; first its new prompt and picture are encoded, if it has any."""
        if command.background:
            raise RequestError("snapshot", "a background session does not go on from a snapshot; open it without")
        self._saving()
        saved = _saved_session(command)
        reading = self._read(command.prompt, None) if command.prompt else ParsedPrompt(saved.text, "")
        if has_picture(command) or (reading.text != saved.text and self._pipeline.text.slow):
            return self._wait(PendingRequest(command, reading.text, reading.notice))
        return self._open_now(command, reading)

    def _go_on(self, command: Open, reading: ParsedPrompt, start: Any) -> list[Event]:
        """Open a session that goes on from a snapshot, with what has been changed since. `start`: see `Session`."""
        assert command.snapshot is not None
        try:
            saved, snapshot = _saved_session(command), self._saving().read_snapshot(command.snapshot)
        except ConfigError as error:
            raise RequestError("snapshot", str(error)) from error
        ahead = self._max_ahead_frames if command.max_ahead_frames is None else command.max_ahead_frames
        session, events = self._load(command.session, snapshot, ahead)
        slot = self._slots[command.session]
        new_text, new_steps = reading.text != session.text, command.steps not in (None, saved.steps)
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

    def _saving(self) -> SavingPipeline:
        if not isinstance(self._pipeline, SavingPipeline):
            raise RequestError("session", f"{type(self._pipeline).__name__} cannot save sessions")
        return self._pipeline


def _saved_session(command: Open) -> SavedSession:
    """What the snapshot of a session to be opened says. Raises RequestError for what is no snapshot of an engine's."""
    assert command.snapshot is not None
    try:
        return read_saved_session(command.snapshot)
    except ConfigError as error:
        raise RequestError("snapshot", str(error)) from error
