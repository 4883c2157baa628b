"""The engine: sessions on top of one pipeline. Commands go in, events come out; the caller runs the loop.

Knows nothing about processes, sockets, clocks or viewers. The same object runs in the engine process (`process.main`)
and in the user's own (`streamdiff.api`).
"""

from __future__ import annotations

from concurrent import futures
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from streamdiff.engine.messages import (
    Close,
    Closed,
    Command,
    Event,
    InputFrames,
    Measured,
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
from streamdiff.engine.prompt_queue import NOTHING, Encoded, PendingRequest, Request, begins_with
from streamdiff.engine.saving import SavingEngine
from streamdiff.engine.session import Session, possible_switches
from streamdiff.engine.validation import (
    SESSION_ERRORS,
    bad_value,
    check_begin,
    check_frames,
    check_open,
    expects_answer,
    reason_of,
    refused,
)
from streamdiff.errors import RequestError
from streamdiff.models.spec import ParsedPrompt


class Engine(SavingEngine):
    """Sessions by name, see `OpenSessions`: commands in, events out."""

    def ready(self) -> Ready:
        """The `Ready` event: model, sizes, defaults and capacity of the pipeline."""
        pipeline, text = self._pipeline, self._pipeline.text
        return Ready(
            **asdict(pipeline.info),
            examples=tuple(text.examples),
            suggestions=text.suggestions,
            vocabulary=text.vocabulary,
            work_s=pipeline.work_s(),
            sessions_fit=pipeline.sessions_fit(),
            sessions_away=pipeline.sessions_away(),
        )

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
                if not self._pipeline.is_away(slot):
                    session.apply_pending()
            except SESSION_ERRORS as error:
                self._note_failure(slot, error)
        finished = False
        for made in self._pipeline.step(wait_s):
            events += self._number(made)
            finished = finished or made.last
        events += self._begin_lost() + self._end_failed()
        return events + (self._measured() if finished else [])

    def _measured(self) -> list[Event]:
        """The `Measured` event; empty before the first chunk."""
        pipeline = self._pipeline
        work_s, counts = pipeline.work_s(), pipeline.forwards()
        if work_s is None:
            return []
        forwards = tuple(counts.rows[rows] for rows in range(1, max(counts.rows, default=0) + 1))
        encodings = self._text.calls, self._picture.calls, pipeline.video_encodings
        return [
            Measured(
                work_s, tuple(pipeline.occupancy()), tuple(pipeline.busy_s()),
                forwards, tuple(counts.alone), tuple(counts.alone.values()), encodings,
                pipeline.memory_bytes(),
            )
        ]  # fmt: skip

    def _swap(self) -> list[Event]:
        """Swap sessions in and out; returns events of those whose location has changed."""
        events = [event for pending in self._swapping.turn() for event in self._answer(pending)]
        return events + [Swapped(self._sessions[slot].name, location) for slot, location in self._swapping.moved()]

    def _begin_lost(self) -> list[Event]:
        """Reset streams whose caches are lost."""
        return [event for slot in self._pipeline.take_lost() for event in self._sessions[slot].reset(None, "")]

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
        return self._pipeline.busy or bool(self._prompt_queue or self._saves or self._dropped_saves) or changes

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the EngineFailure that ends the pipeline, if there is one or comes within `wait_s`."""
        self._pipeline.check(wait_s)

    def occupancy(self) -> list[float]:
        """See `Pipeline.occupancy`."""
        return self._pipeline.occupancy()

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
        self._check_unused(command.session)
        if command.snapshot is not None:
            return self._open_saved(command)
        reading = ParsedPrompt("") if command.prompt_embeds is not None else self._read(command.prompt, None)
        if self._pipeline.text.slow or begins_with(command):
            self._min_ahead_frames(*self._choice(command))
            return self._wait(PendingRequest(command, reading.text, reading.notice))
        return self._open_now(command, reading)

    def _open_now(self, command: Open, reading: ParsedPrompt, made: Encoded = NOTHING) -> list[Event]:
        if command.snapshot is not None:
            events = self._go_on(command, reading, made.start)
        else:
            events = self._begin(command, reading, made)
        if not command.active:
            self._swapping.set_active(self._slots[command.session], SetActive(command.session, False))
        return events

    def _begin(self, command: Open, reading: ParsedPrompt, made: Encoded) -> list[Event]:
        """Open a session whose stream begins."""
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
            start=made.start,
            embeddings=made.conditioning if command.prompt_embeds is not None else None,
        )
        session.renumber(session.epoch, command.made_frames, command.shown_frames)
        self._pipeline.open(
            slot,
            session.conditioning,
            seed=session.seed,
            epoch=session.epoch,
            steps=steps,
            kv_context=kv_context,
            background=command.background,
            start=made.start,
            video=made.video,
        )
        return session, session.open(reading.notice, possible_switches(self._pipeline, slot))

    def _choice(self, command: Open) -> tuple[int, str]:
        """Steps and KV context of a session."""
        info = self._pipeline.info
        steps = info.steps if command.steps is None else command.steps
        return steps, info.kv_context if command.kv_context is None else command.kv_context

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
            pending = PendingRequest(command, reading.text, reading.notice)
            waits = self._pipeline.text.slow or command.session in self._prompt_queue
            return self._wait(pending) if waits else self._carry_out(pending)
        # What comes before the session is there waits for it, and a reset begins with the prompt that was asked for.
        text = self._text_to_encode(session) if isinstance(command, Reset) else ""
        queued = command.session in self._prompt_queue
        if opening or text or (isinstance(command, Reset) and (command.image is not None or queued)):
            return self._wait(PendingRequest(command, text))
        return self._carry_out(PendingRequest(command))

    def _carry_out(self, pending: PendingRequest) -> list[Event]:
        """`_do`, where a session that fails half way is ended."""
        try:
            return self._do(pending)
        except RequestError:
            raise
        except SESSION_ERRORS as error:
            self._note_failure(self._slots[pending.request.session], error)
            return self._end_failed()

    def _do(self, pending: PendingRequest) -> list[Event]:
        """Carry out a request whose text, if it has one, need not be waited for."""
        request = pending.request
        if isinstance(request, Open):
            return self._open_now(request, ParsedPrompt(pending.text, pending.notice), pending.made)
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
                self._pipeline.check_input(request.strength)
                return session.set_input(request.strength, request.request)
            case InputFrames():
                check_frames(request, self._pipeline.info)
                if not self._pipeline.is_away(slot):
                    session.apply_pending()  # the input that they are for may be among it
                    self._pipeline.check_input(None)
                    self._pipeline.feed(slot, request.pictures)
            case Pause() | Resume():
                session.set_paused(isinstance(request, Pause))
            case Reset():
                if request.image is not None or request.no_image:
                    session.start = pending.made.start
                return session.reset(request.seed, request.request)
            case SetMaxAhead():
                session.set_max_ahead(request.frames)
            case Shown():
                session.shown(request.frames)
        return []

    def _end_failed(self) -> list[Event]:
        """End the sessions that have failed. Mutates: self."""
        events: list[Event] = []
        reasons, self._failures = self._failures, {}
        for slot, why in reasons.items():
            if (session := self._sessions.get(slot)) is not None:
                ended = self._close(session.name)
                events += [replace(event, reason=why) if isinstance(event, Closed) else event for event in ended]
        return events

    # ---- texts --------------------------------------------------------------------------------------------------

    def _wait(self, pending: PendingRequest) -> list[Event]:
        self._prompt_queue.ask(pending)
        return self.settle()

    def _answer(self, pending: PendingRequest) -> list[Event]:
        """Carry out a request whose parts are encoded, or refuse it with the error of encoding."""
        error = pending.error
        if error is not None and not isinstance(error, SESSION_ERRORS):
            raise error
        conditioning = pending.made.conditioning
        if conditioning is not None and pending.text:
            self._texts[pending.request.session] = pending.text, conditioning
        replaced = conditioning is None and error is None
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
