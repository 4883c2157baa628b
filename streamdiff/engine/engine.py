"""The engine: sessions on top of one pipeline. Commands go in, events come out; the caller runs the loop.

Knows nothing about processes, sockets, clocks or viewers. The same object runs in the engine process (`process.main`)
and in the user's own (`streamdiff.api`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from streamdiff.core import Frames, control_values, lora_id, split_label
from streamdiff.engine import messages, validation
from streamdiff.engine.change_log import KeptPlace
from streamdiff.engine.messages import Command, Event, InputFrames, Open, Reset, Rewind, SetPrompt, StreamCommand
from streamdiff.engine.prompt_queue import PendingRequest, PromptQueue
from streamdiff.engine.resting import SaveAndSwapQueue
from streamdiff.engine.session import Session, possible_switches
from streamdiff.engine.timeline import TimedChange
from streamdiff.errors import ConfigError, EngineFailure, RequestError, StreamdiffError
from streamdiff.models.spec import ParsedPrompt
from streamdiff.snapshot_header import read_saved_session, saved_stream

if TYPE_CHECKING:
    from streamdiff.pipeline.loras import LoadedLora
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

_AT_ONCE = messages.Shown | messages.SetMaxAhead | messages.SetActive
_UNANSWERED = _AT_ONCE | InputFrames


def _named(changes: Sequence[TimedChange]) -> tuple[str, ...]:
    """LoRAs that changes name."""
    return tuple({each.lora.name for each in changes if each.lora is not None})


class Engine:
    """Sessions by name, each in a slot of a pipeline: commands in, events out."""

    def __init__(self, pipeline: StreamingPipeline, max_ahead_frames: int, keep_bytes: int = 0) -> None:
        """Args:
        pipeline: its `info` says steps and KV context of a session that does not name its own.
        max_ahead_frames: frames made beyond those shown, at most, per session; more where the pipeline needs it.
        keep_bytes: of host memory for snapshots that sessions can be rewound to; 0: none.
        """
        self._pipeline = pipeline
        self._max_ahead_frames = max_ahead_frames
        self._sessions: dict[str, Session] = {}
        self._in_slot: dict[int, Session] = {}  # the same
        # A slot's next session starts above all epochs of the one before: frames are never taken for its own.
        self._next_epoch: dict[int, int] = {}
        self._prompt_queue = PromptQueue(pipeline)
        self._resting = SaveAndSwapQueue(pipeline, self._in_slot, keep_bytes)
        pipeline.on_fault = self._note_failure

    def ready(self) -> messages.Ready:
        """The `Ready` event: model, sizes, defaults and capacity of the pipeline."""
        pipeline, text = self._pipeline, self._pipeline.text
        return messages.Ready(
            **asdict(pipeline.info),
            examples=tuple(text.examples),
            suggestions=text.suggestions,
            vocabulary=text.vocabulary,
            chunk_compute_s=pipeline.figures.chunk_compute_s(),
            max_sessions=pipeline.figures.max_sessions(),
            max_swapped_sessions=pipeline.figures.max_swapped_sessions(),
            loras=pipeline.loras.names,
        )

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command; returns its events. An invalid command changes nothing and returns `Refused`."""
        try:
            if isinstance(command, Open):
                return self._open(command)
            if isinstance(command, messages.Shutdown):
                names = [*self._sessions, *self._prompt_queue.opening()]
                return [event for name in names for event in self._close(name)]
            if isinstance(command, messages.Save):
                self._resting.saves.append((command, self._check_saved(command.session)))
                return []
            return self._control(command)
        except RequestError as error:
            return [validation.refused(command, error)]

    def step(self, wait_s: float = 0.0) -> list[Event]:
        """Carry out queued requests that are ready, and one micro-step of every rank; returns all events. Where there
        is nothing to do but wait, waits up to `wait_s`."""
        pipeline = self._pipeline
        events = self._take_commands(wait_s)
        with pipeline.watched():
            message = pipeline.schedule()
            pipeline.run(message)
            finished = pipeline.sample()
        pipeline.decode(message, finished)
        return events + self._deliver(pipeline.collect(0.0 if message or finished else wait_s))

    def _take_commands(self, wait_s: float) -> list[Event]:
        """Carry out queued requests whose parts are encoded; continue swapping, saving and live video where there are
        any, and give the pipeline new prompts, steps and inputs. Mutates: self, pipeline."""
        events: list[Event] = []
        if self._prompt_queue.lines or self._prompt_queue.ahead:
            if not self._pipeline.busy:
                futures.wait(self._prompt_queue.encodings(), wait_s, futures.FIRST_COMPLETED)
            events += self.settle()
        events += self._apply_changes()  # before a session that came back for them is swapped out again
        events += self._resting.advance() + self._resting.kept.news(self._sessions.values())
        self._pipeline.attend()
        return events

    def _deliver(self, frames: Sequence[Frames]) -> list[Event]:
        """Frames as events, with what was measured where a chunk is whole; sessions that failed end. Mutates: self."""
        events = [event for made in frames for event in self._number(made)]
        events += self._end_failed()
        return events + (self._measured() if any(made.last for made in frames) else [])

    def _apply_changes(self) -> list[Event]:
        """Give the pipeline the prompts, steps and inputs that were accepted, and those of timelines. Mutates: the
        sessions."""
        events: list[Event] = []
        for session in list(self._sessions.values()):
            if self._is_due(session):
                try:
                    events += session.apply_changes()
                except validation.SESSION_ERRORS as error:
                    self._note_failure(session.slot, error)
            if session.later and session.catch_up is None:
                later, session.later = session.later, []
                events += [event for pending in later for event in self._answer(pending)]
        return events

    def _is_due(self, session: Session) -> bool:
        return session.due and not self._pipeline.resting.is_away(session.slot)

    def _measured(self) -> list[Event]:
        """The `LoadFigures` event; empty before the first chunk."""
        figures = self._pipeline.figures
        chunk_compute_s, counts = figures.chunk_compute_s(), figures.forwards()
        if chunk_compute_s is None:
            return []
        forwards = tuple(counts.rows[rows] for rows in range(1, max(counts.rows, default=0) + 1))
        queue = self._prompt_queue
        encodings = queue.texts_encoded, queue.pictures_encoded, self._pipeline.video.encodings
        return [
            messages.LoadFigures(
                chunk_compute_s, tuple(figures.occupancy()), tuple(figures.busy_s()),
                forwards, tuple(counts.alone), tuple(counts.alone.values()), encodings,
                self._pipeline.memory_bytes(),
            )
        ]  # fmt: skip

    def settle(self) -> list[Event]:
        """Carry out the requests whose text, picture and features are encoded by now."""
        return [event for pending in self._prompt_queue.poll() for event in self._answer(pending)]

    def encodings(self) -> list[futures.Future[Any]]:
        """Encodings in progress: one that is done lets `settle` do something."""
        return self._prompt_queue.encodings()

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do, or to wait for, before the next command."""
        changes = any(self._is_due(session) for session in self._sessions.values())
        queue = self._prompt_queue
        return self._pipeline.busy or bool(queue.lines or queue.ahead or self._resting.saves) or changes

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the EngineFailure that ends the pipeline, if there is one or comes within `wait_s`."""
        self._pipeline.check(wait_s)

    def occupancy(self) -> list[float]:
        """Share of the time since loading that each rank was at work; empty with one rank."""
        return self._pipeline.figures.occupancy()

    def describe(self) -> str:
        """Where every session is, for an error message."""
        sessions = self._sessions.values()
        where = [f"session {each.name!r} at chunk {each.chunk + 1} (epoch {each.epoch})" for each in sessions]
        return ", ".join(where) or "no session open"

    def close(self) -> None:
        """Free the pipeline and everything in it."""
        self._sessions.clear()
        self._in_slot.clear()
        self._prompt_queue.close()
        self._pipeline.close()

    # ---- commands ----------------------------------------------------------------------------------------------

    def _open(self, command: Open) -> list[Event]:
        validation.check_open(command, self._pipeline.info)
        self._check_unused(command.session)
        if command.snapshot is not None:
            reading = self._read_beside_snapshot(command, command.snapshot)
        elif command.source:
            reading = ParsedPrompt("")
            self._source(command)
        else:
            try:
                self._pipeline.resting.check_facts(command.facts)
            except ConfigError as error:
                raise RequestError("log", str(error), error.code) from error
            reading = ParsedPrompt("") if command.prompt_embeds is not None else self._read(command.prompt, None)
            self._min_ahead_frames(*self._choice(command))
        return self._wait(PendingRequest(command, reading.text, reading.notice, loras=self._labels(command, None)))

    def _open_now(self, command: Open, pending: PendingRequest) -> list[Event]:
        """Open a session whose parts are encoded."""
        if command.snapshot is None and not command.source:
            events = self._begin(command, pending)
        else:
            events = self._resume(command, pending, self._source(command) if command.source else None)
        if not command.active:
            slot = self._sessions[command.session].slot
            self._resting.set_active(slot, messages.SetActive(command.session, False))
        return events

    def _begin(self, command: Open, pending: PendingRequest) -> list[Event]:
        """Open a session whose stream begins."""
        slot, made = self._free_slot(), pending.made
        loras = self._take(slot, made.loras)
        steps, kv_context = self._choice(command)
        session = Session(
            command.session, self._pipeline, slot, self._prompt_queue.encode_text, text=pending.text, seed=command.seed,
            kv_context=kv_context, epoch=max(command.epoch, self._next_epoch.get(slot, 0)),
            max_ahead_frames=self._max_ahead_frames if command.max_ahead_frames is None else command.max_ahead_frames,
            min_ahead_frames=self._min_ahead_frames(steps, kv_context), start=made.start,
            image=validation.digest_of(command.image), steps=steps,
        )  # fmt: skip
        if command.prompt_embeds is not None or made.image_features is not None:
            session.embeddings = made.conditioning
        else:
            session.encoded = pending.text, made.conditioning
        session.renumber(session.epoch, command.made_frames, command.shown_frames)
        start = partial(
            self._pipeline.open, slot, made.conditioning, seed=session.seed, epoch=session.epoch, steps=steps,
            kv_context=kv_context, background=command.background, start=made.start, video=made.video,
            **({} if made.controls is None else {"controls": made.controls}),
        )  # fmt: skip
        try:
            self._resting.retry_after_swap_out(start)
        except validation.SESSION_ERRORS as error:
            raise validation.bad_value(error, "session") from error
        self._sessions[session.name] = self._in_slot[slot] = session
        session.origin = "" if made.video is None else "it began with latents of a video"
        session.origin = session.origin if made.controls is None else "it began with a camera's poses"
        session.begins()
        for name, scale in (command.loras or {}).items():
            session.set_lora(loras[name], scale, 1, "")
        try:
            changes = tuple(self._read_changes(session, command.changes, loras, as_read=True))
        except RequestError:
            self._close(session.name)
            raise
        session.set_timeline(changes, 0, self._prompt_queue.encode_ahead, "")
        return session.open(pending.notice, possible_switches(self._pipeline, slot))

    def _choice(self, command: Open) -> tuple[int, str]:
        """Steps and KV context of a session."""
        info = self._pipeline.info
        steps = info.steps if command.steps is None else command.steps
        return steps, info.kv_context if command.kv_context is None else command.kv_context

    def _control(self, command: StreamCommand) -> list[Event]:
        if isinstance(command, messages.Close):
            return self._close(command.session)
        opening = command.session in self._prompt_queue.opening()
        if opening and isinstance(command, InputFrames):
            return []  # others follow, and are newer
        session = None if opening else self._find(command)
        pending = PendingRequest(command)
        if isinstance(command, SetPrompt):
            if session is not None:
                self._pipeline.check_switch(session.slot, command.switch)
            validation.check_blend(command)
            previous = self._prompt_queue.latest_text(command.session) or (session.text if session else "") or None
            reading = self._read(command.prompt, previous)
            pending = PendingRequest(command, reading.text, reading.notice)
        elif isinstance(command, Reset):
            validation.check_begin(command, self._pipeline.info)
            pending = PendingRequest(command, self._text_to_encode(session))
        elif isinstance(command, messages.SetLora | messages.SetTimeline):
            pending = PendingRequest(command, self._text_to_encode(session), loras=self._labels(command, session))
        # What comes before the session is there waits for it, and a reset begins with the prompt that was asked for.
        behind = isinstance(command, messages.SetLora) and command.session in self._prompt_queue  # it may be read
        waits = opening or behind or isinstance(command, SetPrompt | Reset | Rewind) or pending.loras or pending.text
        return self._wait(pending) if waits else self._carry_out(pending)

    def _carry_out(self, pending: PendingRequest) -> list[Event]:
        """`_do`, where a session that fails half way is ended; while it catches up it is done later."""
        session = self._sessions.get(pending.request.session)
        if session is not None and session.catch_up is not None and not isinstance(pending.request, _AT_ONCE | Rewind):
            if not isinstance(pending.request, InputFrames):  # others follow, and are newer
                session.later.append(pending)
            return []
        try:
            return self._do(pending)
        except (RequestError, EngineFailure):
            raise
        except validation.SESSION_ERRORS as error:
            self._note_failure(self._sessions[pending.request.session].slot, error)
            return self._end_failed()

    def _do(self, pending: PendingRequest) -> list[Event]:
        """Carry out a request whose text, if it has one, need not be waited for."""
        request = pending.request
        if isinstance(request, Open):
            return self._open_now(request, pending)
        session = self._find(request)
        if session is None:
            return []
        slot = session.slot
        if isinstance(request, Reset | Rewind) or (isinstance(request, SetPrompt) and request.switch == "reset"):
            self._resting.swap_in(slot)
        match request:
            case messages.SetActive():
                self._resting.set_active(slot, request)
            case SetPrompt():
                self._pipeline.check_switch(slot, request.switch)
                change = request.request, request.switch, request.skip, request.over, request.along
                return session.set_prompt(pending.text, pending.notice, *change)
            case messages.SetSteps():
                self._pipeline.check_steps(slot, request.steps)
                min_ahead_frames = self._min_ahead_frames(request.steps, session.kv_context)
                return session.set_steps(request.steps, min_ahead_frames, request.request)
            case messages.SetLora(name=name, scale=scale, over=over):
                known = session.lora_names | self._take(slot, pending.made.loras)
                if name not in known:
                    why = f"lora is {name[:60]!r}; the session has {', '.join(known) or 'none'}"
                    raise RequestError("lora", why, "lora")
                return session.set_lora(known[name], scale, over, request.request)
            case messages.SetInput():
                self._pipeline.video.check_input(request.strength)
                return session.set_input(request.strength, request.request)
            case messages.SetControls():
                return session.set_controls(request.values, request.request)
            case messages.SetTimeline():
                loras = self._take(slot, pending.made.loras)
                changes = tuple(self._read_changes(session, request.changes, loras))
                return session.set_timeline(changes, request.begin, self._prompt_queue.encode_ahead, request.request)
            case messages.GetLog():
                data = session.log.content(self._pipeline.resting.facts(), self._pipeline.next_chunk(slot))
                return [messages.Saved(session.name, request.request, data)]
            case InputFrames():
                if not self._pipeline.resting.is_away(slot):
                    session.apply_pending()  # the input that they are for may be among it
                    self._pipeline.video.check_input(None)
                    self._pipeline.video.feed(slot, request.pictures)
            case messages.SetPaused():
                session.set_paused(request.paused)
            case Reset():
                if request.image is not None or request.no_image:
                    session.start, session.image = pending.made.start, validation.digest_of(request.image)
                    if pending.made.image_features is not None:
                        session.embeddings = pending.made.image_features
                return session.reset(request.seed, request.request)
            case Rewind():
                return self._rewind(session, request)
            case messages.SetMaxAhead():
                session.set_max_ahead(request.frames)
            case messages.Shown():
                session.shown(request.frames)
        return []

    def _labels(self, command: StreamCommand, session: Session | None) -> tuple[str, ...]:
        """Names or labels of the LoRAs that have to be read for a request. Raises RequestError for a scale out of
        range."""
        match command:
            case messages.SetLora(name=name, scale=scale):
                validation.check_lora(command)
                return () if scale is None or (session and name in session.lora_names) else (name,)
            case Open(loras=loras, snapshot=snapshot, changes=changes):
                saved = read_saved_session(snapshot).loras if snapshot else ()
                return (*saved, *(loras or ()), *_named(changes))
            case messages.SetTimeline(changes=changes):
                return _named(changes)
        return ()

    def _take(self, slot: int, loras: Sequence[LoadedLora]) -> dict[str, int]:
        """Have LoRAs that were read loaded on all ranks, for a session in `slot`; their ids by name. Raises
        RequestError where they are too many."""
        return self._pipeline.loras.take(loras, slot, self._used_loras()) if loras else {}

    def _used_loras(self) -> set[int]:
        """Ids of those that sessions have, or chunks in flight."""
        own = (each.all_loras | self._pipeline.loras_of(each.slot) for each in self._sessions.values())
        return {lora for each in own for lora in each}

    def _read_changes(
        self, session: Session, given: Sequence[TimedChange], loras: Mapping[str, int], as_read: bool = False
    ) -> Iterator[TimedChange]:
        """The changes of a timeline, with prompts as texts that the model is given, and labels of `loras`; `as_read`:
        they are such, as a log has them. Raises RequestError for the first that a client could not ask for."""
        slot, previous, usual = session.slot, session.text or None, ""
        for change in given:
            if change.prompt is not None:
                usual = usual or next(each for each in possible_switches(self._pipeline, slot) if each != "reset")
                asked = SetPrompt("", change.prompt, "", change.switch or usual, over=change.over, along=change.along)
                self._pipeline.check_switch(slot, asked.switch)
                validation.check_blend(asked)
                previous = self._read(change.prompt, previous).text  # which some models refuse
                previous = self._read(change.prompt, None).text if as_read else previous
                if as_read and previous != change.prompt:
                    why = f"the prompt {change.prompt[:60]!r} is read as {previous[:60]!r} by this version"
                    raise RequestError("prompt", why, "model")
                change = replace(change, prompt=previous, switch=asked.switch)  # type: ignore[arg-type]
            if change.steps is not None:
                self._pipeline.check_steps(slot, change.steps)
            if (own := change.lora) is not None:
                label = session.label(loras[split_label(own.name)[0]])
                change = replace(change, lora=replace(own, name=label))
            control_values(self._pipeline.info.controls, change.controls | change.taps)
            yield change

    def _end_failed(self) -> list[Event]:
        """End the sessions that have failed. Mutates: self."""
        failed = [session for session in self._sessions.values() if session.failure]
        return [event for session in failed for event in self._close(session.name, session.failure)]

    def _note_failure(self, slot: int, why: str | Exception) -> None:
        """A session has failed, and is to be ended; an EngineFailure is raised instead. Mutates: the session."""
        if isinstance(why, EngineFailure):
            raise why
        if (session := self._in_slot.get(slot)) is not None and not session.failure:
            session.failure = validation.reason_of(why) if isinstance(why, Exception) else why

    # ---- sessions ----------------------------------------------------------------------------------------------

    def _find(self, command: StreamCommand) -> Session | None:
        """The session of a command; None for commands without an answer to a session that has ended."""
        session = self._sessions.get(command.session)
        if session is not None or isinstance(command, _UNANSWERED):
            return session
        known = ", ".join(repr(name) for name in self._sessions) or "none"
        raise RequestError("session", f"there is no session {command.session!r}; open ones: {known}")

    def _check_unused(self, name: str) -> None:
        """Raise RequestError if there is a session of that name, or one that waits to be opened."""
        if name in self._sessions or name in self._prompt_queue:
            raise RequestError("session", f"session {name!r} is open already; close it or use another id")

    def _free_slot(self) -> int:
        return next(slot for slot in range(len(self._sessions) + 1) if slot not in self._in_slot)

    def _min_ahead_frames(self, steps: int, kv_context: str) -> int:
        """Frames that a session must be allowed to be ahead. Raises RequestError for what the pipeline cannot run."""
        try:
            return self._pipeline.min_ahead_frames(steps=steps, kv_context=kv_context)
        except ValueError as error:
            raise validation.bad_value(error, "kv_context") from error

    def _read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        """Read a prompt; `previous`: the session's text before it, if any."""
        validation.check_prompt(prompt)
        return self._pipeline.text.read(prompt, previous)

    def _number(self, made: Frames) -> list[Event]:
        """Decoded frames as events."""
        session = self._in_slot.get(made.session)
        if session is None:
            return []
        chunk_s = made.chunk_s if made.last else None
        events = session.made(
            epoch=made.epoch, chunk=made.chunk, pictures=made.pictures, chunk_s=chunk_s, control=made.control
        )
        if made.last and not self._pipeline.streams[made.session].background:
            self._resting.keep(session, self._pipeline.next_chunk(made.session))
        video = self._pipeline.video
        if made.last and made.session in video.inputs and (figures := video.input_figures(made.session)) is not None:
            events.append(messages.InputUsed(session.name, figures.level, figures.used, figures.dropped, figures.fault))
        return events

    def _close(self, name: str, reason: str = "") -> list[Event]:
        """End a session, open or waiting to be, and refuse its requests that wait; `reason`: why it failed, if so."""
        if name not in self._prompt_queue.opening():
            self._find(messages.Close(name))
        dropped: list[Command] = [pending.request for pending in self._prompt_queue.drop(name)]
        events: list[Event] = [messages.Closed(name, reason)]
        if (session := self._sessions.pop(name, None)) is not None:
            del self._in_slot[session.slot]
            dropped = [*self._resting.forget(session), *(pending.request for pending in session.later), *dropped]
            self._next_epoch[session.slot] = session.epoch + 1
            self._pipeline.close_session(session.slot)
            for lora in session.all_loras - self._used_loras() if reason else ():  # a rank may have failed to load it
                self._pipeline.loras.drop(lora, session.slot)
        return [*(validation.closed_before(command) for command in dropped if validation.is_answered(command)), *events]

    # ---- saved sessions ------------------------------------------------------------------------------------------

    def _check_saved(self, name: str) -> Session:
        """A session that can be saved now. Raises RequestError."""
        session = self._find(messages.Close(name))
        assert session is not None, "`_find` raises"
        if name in self._prompt_queue or session.catch_up is not None:
            why = f"a prompt of session {name!r} is being encoded, or it is being rewound; save it when that is done"
            raise RequestError("session", why, "encoding")
        return session

    def _text_to_encode(self, session: Session | None) -> str:
        """A session's text, if nothing has encoded it yet, as after a snapshot; else empty."""
        if session is None or session.embeddings is not None or session.name in self._prompt_queue:
            return ""
        return session.text if session.encoded is None or session.encoded[0] != session.text else ""

    def _read_beside_snapshot(self, command: Open, snapshot: messages.Data) -> ParsedPrompt:
        """The prompt of a session that continues from a snapshot; without text, if it is the one that it has."""
        if command.background:
            raise RequestError("snapshot", "a background session does not go on from a snapshot; open it without")
        try:
            saved = read_saved_session(snapshot)
        except ConfigError as error:
            raise RequestError("snapshot", str(error)) from error
        reading = self._read(command.prompt, None) if command.prompt else ParsedPrompt("")
        if saved.blending:  # it comes whole at once
            return reading if reading.text else ParsedPrompt(saved.text)
        return ParsedPrompt("", reading.notice) if reading.text == saved.text else reading

    def catches_up(self, name: str) -> bool:
        """Whether a session makes chunks again that nobody sees."""
        return name in self._sessions and self._sessions[name].catch_up is not None

    def _source(self, command: Open) -> tuple[Session, KeptPlace]:
        """The session that a new one branches off from, and from where. Raises RequestError."""
        source = self._find(messages.Close(command.source))
        assert source is not None, "`_find` raises"
        if source.fed or source.catch_up is not None:
            why = f"session {source.name!r} is fed with video, or is being rewound; ask again when that has ended"
            raise RequestError("session", why, "busy")
        kept = self._resting.kept.find(source, command.chunk, self._pipeline.next_chunk(source.slot))
        labels = {*source.log.loras, *read_saved_session(kept.snapshot).loras}
        if gone := [split_label(each)[0] for each in labels if lora_id(each) not in self._pipeline.loras.loaded]:
            why = f"it had LoRAs that are not loaded any more: {', '.join(gone)}; load them first"
            raise RequestError("chunk", f"chunk is {command.chunk}; {why}", "lora")
        return source, kept

    def _rewind(self, session: Session, command: Rewind) -> list[Event]:
        """A session goes on from an earlier chunk. Raises RequestError: it cannot, and goes on as it did."""
        made = session.made_frames
        opening = Open(
            session.name, "", steps=command.steps, max_ahead_frames=session.max_ahead_frames, epoch=session.epoch + 1,
            made_frames=made, shown_frames=made, source=session.name, chunk=command.chunk,
        )  # fmt: skip
        branch = self._source(opening)
        events: list[Event] = [validation.closed_before(save) for save in self._resting.drop_saves(session)]
        self._pipeline.close_session(session.slot)
        try:
            events += self._resume(opening, PendingRequest(opening), branch, slot=session.slot)
        except RequestError as error:
            raise StreamdiffError(f"it could not be rewound: {error}") from error
        self._resting.kept.rewound(session, command.chunk)
        return [*events, self._sessions[session.name].begins_at(command.request)]

    def _resume(
        self, command: Open, pending: PendingRequest, branch: tuple[Session, KeptPlace] | None = None,
        slot: int | None = None,
    ) -> list[Event]:  # fmt: skip
        """Open a session that continues from a snapshot, with what has been changed since; or that is a `branch` of
        another one from where it was kept, or instead of that, in its `slot`, which the pipeline has closed."""
        data = command.snapshot if branch is None else branch[1].snapshot
        assert data is not None, "one of both is given"
        try:
            snapshot = self._pipeline.resting.read_snapshot(data)
            saved = saved_stream(snapshot)
        except ConfigError as error:
            raise RequestError("snapshot", str(error)) from error
        again, slot = slot is not None, self._free_slot() if slot is None else slot
        start, embeddings = map(snapshot.tensors.get, ("start", "prompt_embeds"))
        if not saved.text and embeddings is None:
            raise RequestError("snapshot", "about.session.text is empty in the snapshot, and it has no prompt_embeds")
        loras = self._take(slot, pending.made.loras)
        session = Session(
            command.session, self._pipeline, slot, self._prompt_queue.encode_text, text=saved.text, seed=saved.seed,
            kv_context=saved.kv_context, epoch=saved.epoch,
            max_ahead_frames=self._max_ahead_frames if command.max_ahead_frames is None else command.max_ahead_frames,
            min_ahead_frames=self._min_ahead_frames(saved.steps, saved.kv_context),
            start=start if pending.made.start is None else pending.made.start, embeddings=embeddings,
            image=validation.digest_of(command.image) if branch is None else branch[0].image, steps=saved.steps,
            encoded=None if branch is None else branch[0].encoded,
            origin="" if snapshot.tensors.get("video") is None else "it began with latents of a video",
        )  # fmt: skip
        frames = self._resting.retry_after_swap_out(lambda: self._pipeline.resting.load(slot, snapshot))
        chunk, oldest, latest, paused = self._pipeline.resting.progress(slot)
        if branch is not None:
            saved = replace(saved, made_frames=command.made_frames, shown_frames=command.shown_frames)
        session.resume_at(saved, chunk, oldest, latest, paused)
        self._sessions[session.name] = self._in_slot[slot] = session
        events = [event for each in frames for event in self._number(each)]
        switches = possible_switches(self._pipeline, slot)
        if branch is not None:
            session.resume_loras({})
            session.renumber(command.epoch + session.epoch - oldest, command.made_frames, command.shown_frames)
            session.catch_up_with(*branch, command.chunk, again, self._prompt_queue.encode_ahead)
            if command.steps is not None:
                session.later.append(PendingRequest(messages.SetSteps(session.name, command.steps)))
            return events if again else events + session.open("", switches)
        new_text, new_steps = bool(pending.text), command.steps not in (None, saved.steps)
        session.renumber(command.epoch - new_text - new_steps, command.made_frames, command.shown_frames)
        scales = saved.loras if command.loras is None else {**dict.fromkeys(saved.loras), **command.loras}
        session.resume_loras({loras[split_label(each)[0]]: scale for each, scale in scales.items()})
        if new_text:
            session.encoded = pending.text, pending.made.conditioning
            session.set_prompt(pending.text, pending.notice, "", next(each for each in switches if each != "reset"))
        if new_steps and command.steps is not None:
            try:
                self._pipeline.check_steps(slot, command.steps)
            except RequestError:
                self._close(command.session)
                raise
            session.set_steps(command.steps, self._min_ahead_frames(command.steps, session.kv_context), "")
        return events + session.open(pending.notice, switches)

    # ---- texts --------------------------------------------------------------------------------------------------

    def _wait(self, pending: PendingRequest) -> list[Event]:
        self._prompt_queue.ask(pending)
        return self.settle()

    def _answer(self, pending: PendingRequest) -> list[Event]:
        """Carry out a request whose parts are encoded, or refuse it with the error of encoding."""
        error, conditioning = pending.error, pending.made.conditioning
        if error is not None and not isinstance(error, validation.SESSION_ERRORS):
            raise error
        session = self._sessions.get(pending.request.session)
        if session is not None and conditioning is not None and pending.text:
            session.encoded = pending.text, conditioning
        try:
            if isinstance(error, RequestError):
                raise error
            if error is not None:
                raise RequestError("prompt", f"the prompt could not be encoded: {validation.reason_of(error)}")
            return self._carry_out(pending)
        except RequestError as refusal:
            return [validation.refused(pending.request, refusal)] if validation.is_answered(pending.request) else []
