"""The sessions that an engine has open, with what opening, controlling and saving them have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from streamdiff.engine.messages import Close, Closed, Event, InputFrames, InputUsed, SetActive, SetMaxAhead, Shown
from streamdiff.engine.pipeline_api import Pipeline
from streamdiff.engine.prompt_queue import PromptQueue, Request
from streamdiff.engine.session import Session
from streamdiff.engine.swapping import Swapping
from streamdiff.engine.validation import (
    bad_value,
    check_prompt,
    closed_before,
    encode_picture,
    expects_answer,
    read_features,
    reason_of,
)
from streamdiff.errors import EngineFailure, RequestError
from streamdiff.models.spec import ParsedPrompt
from streamdiff.pipeline.output import Frames

_Given = TypeVar("_Given")


class Counted(Generic[_Given]):
    """Wraps a function and counts its calls. Thread-safe."""

    def __init__(self, call: Callable[[_Given], Any]) -> None:
        self.calls = 0
        self._call, self._lock = call, threading.Lock()

    def __call__(self, given: _Given) -> Any:
        with self._lock:
            self.calls += 1
        return self._call(given)


class OpenSessions:
    """Sessions by name, each in a slot of `pipeline`."""

    def __init__(self, pipeline: Pipeline, max_ahead_frames: int) -> None:
        """Args:
        pipeline: its `info` says steps and KV context of a session that does not name its own.
        max_ahead_frames: frames made beyond those shown, at most, per session; more where the pipeline needs it.
        """
        self._pipeline = pipeline
        self._max_ahead_frames = max_ahead_frames
        self._slots: dict[str, int] = {}
        self._sessions: dict[int, Session] = {}
        self._swapping = Swapping(pipeline)
        self._text, self._picture = Counted(pipeline.text.encode), Counted(partial(encode_picture, pipeline))
        self._prompt_queue = PromptQueue(self._text, self._picture, partial(read_features, pipeline))
        self._texts: dict[str, tuple[str, Any]] = {}  # by session: the text that was encoded last, and what came of it
        # A slot's next session starts above all epochs of the one before: frames are never taken for its own.
        self._next_epoch: dict[int, int] = {}
        self._failures: dict[int, str] = {}  # by slot: why its session has failed first, until it is ended
        pipeline.on_fault = self._note_failure

    def describe(self) -> str:
        """Where every session is, for an error message."""
        sessions = self._sessions.values()
        where = [f"session {each.name!r} at chunk {each.chunk + 1} (epoch {each.epoch})" for each in sessions]
        return ", ".join(where) or "no session open"

    def _find(self, command: Request | Close) -> Session | None:
        """The session of a command; None for commands without an answer to a session that has ended."""
        slot = self._slots.get(command.session)
        if slot is not None:
            return self._sessions[slot]
        if isinstance(command, Shown | SetMaxAhead | SetActive | InputFrames):
            return None
        known = ", ".join(repr(name) for name in self._slots) or "none"
        raise RequestError("session", f"there is no session {command.session!r}; open ones: {known}")

    def _check_unused(self, name: str) -> None:
        """Raise RequestError if there is a session of that name, or one that waits to be opened."""
        if name in self._slots or name in self._prompt_queue:
            raise RequestError("session", f"session {name!r} is open already; close it or use another id")

    def _free_slot(self) -> int:
        return next(slot for slot in range(len(self._slots) + 1) if slot not in self._sessions)

    def _min_ahead_frames(self, steps: int, kv_context: str) -> int:
        """Frames that a session must be allowed to be ahead. Raises RequestError for what the pipeline cannot run."""
        try:
            return self._pipeline.min_ahead_frames(steps=steps, kv_context=kv_context)
        except ValueError as error:
            raise bad_value(error, "kv_context") from error

    def _read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        """Read a prompt; `previous`: the session's text before it, if any."""
        check_prompt(prompt)
        return self._pipeline.text.read(prompt, previous)

    def _encoded(self, name: str, text: str) -> Any:
        """The conditioning of a session's text, cached; slow texts were encoded by the prompt queue before."""
        kept = self._texts.get(name)
        if kept is None or kept[0] != text:
            kept = self._texts[name] = text, self._text(text)
        return kept[1]

    def _number(self, made: Frames) -> list[Event]:
        """Decoded frames as events."""
        session = self._sessions.get(made.session)
        if session is None:
            return []
        chunk_s = made.chunk_s if made.last else None
        events = session.made(epoch=made.epoch, chunk=made.chunk, pictures=made.pictures, chunk_s=chunk_s)
        figures = self._pipeline.input_figures(made.session) if made.last else None
        if figures is not None:
            events.append(InputUsed(session.name, figures.level, figures.used, figures.dropped, figures.fault))
        return events

    def _close(self, name: str) -> list[Event]:
        """End a session, open or waiting to be, and refuse its requests that wait."""
        opening = name in self._prompt_queue.opening()
        if not opening:
            self._find(Close(name))
        dropped = self._prompt_queue.drop(name) + self._swapping.forget(self._slots.get(name, -1))
        events: list[Event] = [closed_before(pending.request) for pending in dropped if expects_answer(pending)]
        self._texts.pop(name, None)
        if opening:
            return [*events, Closed(name)]
        slot = self._slots.pop(name)
        session = self._sessions.pop(slot)
        self._next_epoch[slot] = session.epoch + 1
        self._failures.pop(slot, None)
        return [*events, *session.close()]

    def _note_failure(self, slot: int, why: str | Exception) -> None:
        """A session has failed, and is to be ended; an EngineFailure is raised instead. Mutates: self."""
        if isinstance(why, EngineFailure):
            raise why
        self._failures.setdefault(slot, reason_of(why) if isinstance(why, Exception) else why)
