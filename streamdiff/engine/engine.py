"""The engine: sessions on top of one pipeline. Commands go in, events come out; the caller runs the loop.

Knows nothing about processes, sockets, clocks or viewers. The same object runs in the engine process (`process.main`)
and in the user's own (`streamdiff.api`).
"""

from __future__ import annotations

from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import Any

from streamdiff.engine import reports
from streamdiff.engine.failures import Failures
from streamdiff.engine.messages import (
    Close,
    Closed,
    Command,
    Event,
    InputFrames,
    Open,
    Pause,
    Ready,
    Reset,
    Resume,
    Save,
    SetActive,
    SetInput,
    SetMaxAhead,
    SetPrompt,
    SetSteps,
    Shown,
    Shutdown,
    Swapped,
)
from streamdiff.engine.pending_saves import PendingSaves
from streamdiff.engine.pipeline_api import Pipeline
from streamdiff.engine.prompt_queue import Encoded, PendingRequest, PromptQueue, Request, begins_with, has_picture
from streamdiff.engine.reports import Counted
from streamdiff.engine.saving import NOTHING, EngineSnapshotMixin
from streamdiff.engine.session import Session, possible_switches
from streamdiff.engine.swapping import Swapping
from streamdiff.engine.validation import (
    SESSION_ERRORS,
    bad_value,
    check_begin,
    check_frames,
    check_open,
    check_prompt,
    encode_picture,
    expects_answer,
    feeding,
    read_features,
    reason_of,
    refused,
)
from streamdiff.errors import RequestError
from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.pipeline.output import Frames


class Engine(EngineSnapshotMixin):
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
        self._saves = PendingSaves()
        self._text, self._picture = Counted(pipeline.text.encode), Counted(partial(encode_picture, pipeline))
        self._prompt_queue = PromptQueue(self._text, self._picture, partial(read_features, pipeline))
        self._texts: dict[str, tuple[str, Any]] = {}  # by session: the text that was encoded last, and what came of it
        # A slot's next session starts above all epochs of the one before: frames are never taken for its own.
        self._next_epoch: dict[int, int] = {}
        self._failures = Failures()
        pipeline.on_fault = self._failures.note

    def ready(self) -> Ready:
        """The `Ready` event: model, sizes, defaults and capacity of the pipeline."""
        return reports.ready(self._pipeline, self._swapping.sessions_away())

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command; returns its events. An invalid command changes nothing and returns `Refused`."""
        try:
            if isinstance(command, Open):
                return self._open(command)
            if isinstance(command, Shutdown):
                names = [*self._slots, *self._prompt_queue.opening()]
                return [event for name in names for event in self._close(name)]
            if isinstance(command, Save):
                return self._save(command)
            return self._control(command)
        except RequestError as error:
            return [refused(command, error)]

    def step(self, wait_s: float = 0.0) -> list[Event]:
        """Carry out queued requests that are ready, apply new prompts and steps, step the pipeline once, and end
        sessions that failed; returns all events. Where there is nothing to do but wait, waits up to `wait_s`."""
        if self._prompt_queue and not self._pipeline.busy:
            futures.wait(self._prompt_queue.encodings(), wait_s, futures.FIRST_COMPLETED)
        events = self._swap() + self.settle() + self._turn_saves()
        for slot, session in self._sessions.items():
            try:
                if not self._swapping.away(slot):
                    session.apply_pending()
            except SESSION_ERRORS as error:
                self._failures.note_error(slot, error)
        finished = False
        for made in self._pipeline.step(wait_s):
            events += self._number(made)
            finished = finished or made.last
        events += self._begin_lost() + self._end_failed()
        return events + (reports.measured(self._pipeline, self._text.calls, self._picture.calls) if finished else [])

    def _swap(self) -> list[Event]:
        """Swap sessions in and out; returns events of those whose location has changed."""
        events = [event for pending in self._swapping.turn() for event in self._answer(pending)]
        return events + [Swapped(self._sessions[slot].name, location) for slot, location in self._swapping.moved()]

    def _begin_lost(self) -> list[Event]:
        """Reset streams whose caches are lost."""
        return [event for slot in self._swapping.lost() for event in self._sessions[slot].reset(None, "")]

    def _free_slot(self) -> int:
        return next(slot for slot in range(len(self._slots) + 1) if slot not in self._sessions)

    def settle(self) -> list[Event]:
        """Carry out the requests whose text, picture and features are encoded by now."""
        return [event for pending in self._prompt_queue.turn() for event in self._answer(pending)]

    def encodings(self) -> list[futures.Future[Any]]:
        """Encodings in progress: one that is done lets `settle` do something."""
        return self._prompt_queue.encodings()

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do, or to wait for, before the next command."""
        changes = any(session.input_changes for session in self._sessions.values())
        return self._pipeline.busy or bool(self._prompt_queue or self._saves) or changes

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the EngineFailure that ends the pipeline, if there is one or comes within `wait_s`."""
        self._pipeline.check(wait_s)

    def occupancy(self) -> list[float]:
        """See `Pipeline.occupancy`."""
        return self._pipeline.occupancy()

    def describe(self) -> str:
        """Where every session is, for an error message."""
        return reports.describe(self._sessions.values())

    def close(self) -> None:
        """Free the pipeline and everything in it."""
        self._slots.clear()
        self._sessions.clear()
        self._texts.clear()
        self._prompt_queue.close()
        self._pipeline.close()

    # ---- commands ----------------------------------------------------------------------------------------------

    def _open(self, command: Open) -> list[Event]:
        check_open(command, self._pipeline.info)
        if command.session in self._slots or command.session in self._prompt_queue:
            raise RequestError("session", f"session {command.session!r} is open already; close it or use another id")
        if command.snapshot is not None:
            return self._open_saved(command)
        reading = ParsedPrompt("") if command.prompt_embeds is not None else self._read(command.prompt, None)
        if self._pipeline.text.slow or begins_with(command):
            self._min_ahead_frames(*self._choice(command))
            return self._wait(PendingRequest(command, reading.text, reading.notice))
        return self._open_now(command, reading)

    def _open_now(self, command: Open, reading: ParsedPrompt, made: Encoded = NOTHING) -> list[Event]:
        if command.snapshot is not None:
            return self._go_on(command, reading, made.start)
        slot = self._free_slot()
        try:
            session, events = self._swapping.retry_after_swap_out(lambda: self._start(slot, command, reading, made))
        except SESSION_ERRORS as error:
            self._texts.pop(command.session, None)
            raise bad_value(error, "session") from error
        self._slots[command.session] = slot
        self._sessions[slot] = session
        return events

    def _start(self, slot: int, command: Open, reading: ParsedPrompt, made: Encoded) -> tuple[Session, list[Event]]:
        """Open the stream in `slot`. Raises ValueError for what the pipeline cannot run."""
        steps, kv_context = self._choice(command)
        session = Session(
            command.session,
            self._pipeline,
            slot,
            partial(self._encoded, command.session),
            text=reading.text,
            seed=command.seed,
            kv_context=kv_context,
            epoch=max(command.epoch, self._next_epoch.get(slot, 0)),
            max_ahead_frames=self._max_ahead_frames if command.max_ahead_frames is None else command.max_ahead_frames,
            min_ahead_frames=self._min_ahead_frames(steps, kv_context),
            made_frames=command.made_frames,
            shown_frames=command.shown_frames,
            start=made.start,
            embeddings=made.conditioning if command.prompt_embeds is not None else None,
        )
        self._pipeline.open(
            slot,
            session.conditioning,
            seed=session.seed,
            epoch=session.epoch,
            steps=steps,
            kv_context=kv_context,
            background=command.background,
            start=made.start,
            **({} if made.video is None else {"video": made.video}),
        )
        return session, session.open(reading.notice, possible_switches(self._pipeline, slot))

    def _choice(self, command: Open) -> tuple[int, str]:
        """Steps and KV context of a session."""
        info = self._pipeline.info
        steps = info.steps if command.steps is None else command.steps
        return steps, info.kv_context if command.kv_context is None else command.kv_context

    def _min_ahead_frames(self, steps: int, kv_context: str) -> int:
        """Frames that a session must be allowed to be ahead. Raises RequestError for what the pipeline cannot run."""
        try:
            return self._pipeline.min_ahead_frames(steps=steps, kv_context=kv_context)
        except ValueError as error:
            raise bad_value(error, "kv_context") from error

    def _control(self, command: Request | Close) -> list[Event]:
        if isinstance(command, Close):
            return self._close(command.session)
        opening = command.session in self._prompt_queue.opening()
        if opening and isinstance(command, InputFrames):
            return []  # others follow, and are newer
        session = None if opening else self._find(command)
        if isinstance(command, Reset):
            check_begin(command, self._pipeline.info)
        if isinstance(command, SetPrompt):
            if session is not None:
                self._pipeline.check_switch(self._slots[command.session], command.switch)
            previous = self._prompt_queue.latest_text(command.session) or (session.text if session else "") or None
            reading = self._read(command.prompt, previous)
            if self._pipeline.text.slow or command.session in self._prompt_queue:
                return self._wait(PendingRequest(command, reading.text, reading.notice))
            return self._carry_out(PendingRequest(command, reading.text, reading.notice))
        # What comes before the session is there waits for it, and a reset begins with the prompt that was asked for.
        text = self._text_to_encode(session) if isinstance(command, Reset) else ""
        queued = command.session in self._prompt_queue
        if opening or text or (isinstance(command, Reset) and (has_picture(command) or queued)):
            return self._wait(PendingRequest(command, text))
        return self._carry_out(PendingRequest(command))

    def _carry_out(self, pending: PendingRequest) -> list[Event]:
        """`_do`, where a session that fails half way is ended."""
        try:
            return self._do(pending)
        except RequestError:
            raise
        except SESSION_ERRORS as error:
            self._failures.note_error(self._slots[pending.request.session], error)
            return self._end_failed()

    def _do(self, pending: PendingRequest) -> list[Event]:
        """Carry out a request whose text, if it has one, need not be waited for."""
        request = pending.request
        if isinstance(request, Open):
            made = Encoded(pending.conditioning, pending.start, pending.video)
            return self._open_now(request, ParsedPrompt(pending.text, pending.notice), made)
        session = self._find(request)
        if session is None:
            return []
        slot = self._slots[request.session]
        if self._swapping.put_off(slot, pending):
            return []
        match request:
            case SetActive():
                self._swapping.set_active(slot, request)
            case SetPrompt():
                self._pipeline.check_switch(slot, request.switch)
                change = request.request, request.switch, request.skip
                return session.set_prompt(pending.text, pending.notice, *change)
            case SetSteps():
                self._pipeline.check_steps(slot, request.steps)
                min_ahead_frames = self._min_ahead_frames(request.steps, session.kv_context)
                return session.set_steps(request.steps, min_ahead_frames, request.request)
            case SetInput():
                feeding(self._pipeline, request.strength)
                return session.set_input(request.strength, request.request)
            case InputFrames():
                check_frames(request, self._pipeline.info)
                if not self._swapping.away(slot):
                    session.apply_pending()  # the input that they are for may be among it
                    feeding(self._pipeline, None).feed(slot, request.pictures)
            case Pause() | Resume():
                session.set_paused(isinstance(request, Pause))
            case Reset():
                if has_picture(request) or request.no_image:
                    session.start = pending.start
                return session.reset(request.seed, request.request)
            case SetMaxAhead():
                session.set_max_ahead(request.frames)
            case Shown():
                session.shown(request.frames)
        return []

    def _close(self, name: str) -> list[Event]:
        opening = name in self._prompt_queue.opening()
        if not opening:
            self._find(Close(name))
        closed = RequestError("session", f"session {name!r} was closed before this was done")
        dropped = self._prompt_queue.drop(name) + self._swapping.forget(self._slots.get(name, -1))
        events: list[Event] = [refused(pending.request, closed) for pending in dropped if expects_answer(pending)]
        events += [refused(command, closed) for command in self._saves.forget(name)]
        self._texts.pop(name, None)
        if opening:
            return [*events, Closed(name)]
        slot = self._slots.pop(name)
        session = self._sessions.pop(slot)
        self._next_epoch[slot] = session.epoch + 1
        self._failures.drop(slot)
        return [*events, *session.close()]

    def _end_failed(self) -> list[Event]:
        """End the sessions that have failed. Mutates: self."""
        events: list[Event] = []
        for slot, why in self._failures.take().items():
            if (session := self._sessions.get(slot)) is not None:
                ended = self._close(session.name)
                events += [replace(event, reason=why) if isinstance(event, Closed) else event for event in ended]
        return events

    def _find(self, command: Request | Close) -> Session | None:
        """The session of a command; None for commands without an answer to a session that has ended."""
        slot = self._slots.get(command.session)
        if slot is not None:
            return self._sessions[slot]
        if isinstance(command, Shown | SetMaxAhead | SetActive | InputFrames):
            return None
        known = ", ".join(repr(name) for name in self._slots) or "none"
        raise RequestError("session", f"there is no session {command.session!r}; open ones: {known}")

    def _read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        check_prompt(prompt)
        return self._pipeline.text.read(prompt, previous)

    # ---- texts --------------------------------------------------------------------------------------------------

    def _wait(self, pending: PendingRequest) -> list[Event]:
        self._prompt_queue.ask(pending)
        return self.settle()

    def _answer(self, pending: PendingRequest) -> list[Event]:
        """Carry out a request whose parts are encoded, or refuse it with the error of encoding."""
        error = pending.error
        if error is not None and not isinstance(error, SESSION_ERRORS):
            raise error
        if pending.conditioning is not None and pending.text:
            self._texts[pending.request.session] = pending.text, pending.conditioning
        replaced = pending.conditioning is None and error is None
        if isinstance(pending.request, SetPrompt) and pending.request.switch != "keep" and replaced:
            pending = replace(pending, request=replace(pending.request, switch="keep"))  # its text is not to be seen
        try:
            if isinstance(error, RequestError):
                raise error
            if error is not None:
                raise RequestError("prompt", f"the prompt could not be encoded: {reason_of(error)}")
            return self._carry_out(pending)
        except RequestError as refusal:
            if pending.request.session not in self._slots:
                self._texts.pop(pending.request.session, None)
            return [refused(pending.request, refusal)] if expects_answer(pending) else []

    def _encoded(self, name: str, text: str) -> Any:
        """The conditioning of a session's text, cached; slow texts were encoded by the prompt queue before."""
        kept = self._texts.get(name)
        if kept is None or kept[0] != text:
            kept = self._texts[name] = text, self._text(text)
        return kept[1]

    def _number(self, made: Frames) -> list[Event]:
        session = self._sessions.get(made.session)
        if session is None:
            return []
        chunk_s = made.chunk_s if made.last else None
        events = session.made(epoch=made.epoch, chunk=made.chunk, pictures=made.pictures, chunk_s=chunk_s)
        return events + (reports.input_used(self._pipeline, made.session, session) if made.last else [])
