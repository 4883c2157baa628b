"""The engine: sessions on top of one pipeline. Commands go in, events come out; the caller turns the crank.

Knows nothing about processes, sockets, clocks or viewers. The same object runs behind the bridge (`main`) and in the
user's own process (`streamdiff.api`).
"""

from __future__ import annotations

from collections.abc import Iterable

from streamdiff.config import ModelConfig
from streamdiff.engine.contract import Made, Pipeline, Reading
from streamdiff.engine.messages import (
    Close,
    Command,
    Event,
    Open,
    Pause,
    Ready,
    Refused,
    Reset,
    Resume,
    SetPrompt,
    Shown,
    Shutdown,
)
from streamdiff.engine.session import Allow, End, Hold, Output, Session, StartAfresh, UseText
from streamdiff.errors import RequestError

MAX_PROMPT_CHARACTERS = 2000
MAX_SEED = 2**31 - 1


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise RequestError("prompt", "the prompt is empty; describe what to show")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            "prompt",
            f"the prompt has {len(prompt):,} characters; at most {MAX_PROMPT_CHARACTERS:,} are read. Shorten it.",
        )


def _check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise RequestError("seed", f"the seed is {seed}; it must be a whole number from 0 to {MAX_SEED}")


class Engine:
    """Sessions by name, each in a slot of `pipeline`."""

    def __init__(self, pipeline: Pipeline, defaults: ModelConfig, lead_frames: int) -> None:
        """Args:
        defaults: `steps` and `kv_context` of a session that does not name its own.
        lead_frames: frames made beyond those shown, at most, per session. Where the pipeline needs more, it gets more.
        """
        self._pipeline = pipeline
        self._defaults = defaults
        self._lead_frames = lead_frames
        self._slots: dict[str, int] = {}
        self._sessions: dict[int, Session] = {}
        # A slot's next session starts above all epochs of the one before, so frames can never be taken for its own.
        self._next_epoch: dict[int, int] = {}

    def ready(self) -> Ready:
        """What the pipeline is, for whoever connects."""
        info, text = self._pipeline.info, self._pipeline.text
        return Ready(
            model=info.name,
            device=info.device,
            width=info.width,
            height=info.height,
            native_fps=info.native_fps,
            chunk_frames=info.chunk_frames,
            steps=info.steps,
            kv_context=info.kv_context,
            examples=tuple(text.examples),
            vocabulary=text.vocabulary,
        )

    def handle(self, command: Command) -> list[Event]:
        """Carry out one command. What cannot be done is answered by `Refused`, and changes nothing."""
        try:
            if isinstance(command, Open):
                return self._open(command)
            if isinstance(command, Shutdown):
                return [event for name in list(self._slots) for event in self._close(name)]
            return self._control(command)
        except RequestError as error:
            request = command.request if isinstance(command, SetPrompt | Reset) else ""
            session = "" if isinstance(command, Shutdown) else command.session
            return [Refused(session, request, error.field, str(error))]

    def step(self, wait_s: float = 0.0) -> list[Event]:
        """Give waiting prompts to the pipeline, let it work once, and number what came out."""
        for slot, session in self._sessions.items():
            self._carry_out(slot, session.take_prompt())
        events: list[Event] = []
        for made in self._pipeline.step(wait_s):
            events += self._number(made)
        return events

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do before the next command."""
        return self._pipeline.busy

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the EngineFailure that ends the pipeline, if there is one or comes within `wait_s`."""
        self._pipeline.check(wait_s)

    def occupancy(self) -> list[float]:
        """See `Pipeline.occupancy`."""
        return self._pipeline.occupancy()

    def describe(self) -> str:
        """Where every session is, for an error message."""
        if not self._sessions:
            return "no session open"
        return ", ".join(
            f"session {session.name!r} at chunk {session.chunk + 1} (epoch {session.epoch})"
            for session in self._sessions.values()
        )

    def close(self) -> None:
        """Free the pipeline and everything in it."""
        self._slots.clear()
        self._sessions.clear()
        self._pipeline.close()

    # ---- commands ----------------------------------------------------------------------------------------------

    def _open(self, command: Open) -> list[Event]:
        if not command.session:
            raise RequestError("session", "the session has no id; give any non-empty text")
        if command.session in self._slots:
            raise RequestError("session", f"session {command.session!r} is open already; close it or use another id")
        _check_seed(command.seed)
        reading = self._read(command.prompt, None)
        slot = next(slot for slot in range(len(self._slots) + 1) if slot not in self._sessions)
        try:
            session, events = self._start(slot, command, reading)
        except ValueError as error:
            raise RequestError(getattr(error, "field", "session"), str(error)) from error
        self._slots[command.session] = slot
        self._sessions[slot] = session
        return events

    def _start(self, slot: int, command: Open, reading: Reading) -> tuple[Session, list[Event]]:
        """Open the stream in `slot`. Raises ValueError for what the pipeline cannot run."""
        pipeline = self._pipeline
        steps = self._defaults.steps if command.steps is None else command.steps
        kv_context = self._defaults.kv_context if command.kv_context is None else command.kv_context
        session = Session(
            command.session,
            text=reading.text,
            seed=command.seed,
            epoch=self._next_epoch.get(slot, 0),
            lead_frames=max(self._lead_frames, pipeline.minimum_lead(steps=steps, kv_context=kv_context)),
        )
        conditioning = pipeline.text.encode(session.text)
        pipeline.open(slot, conditioning, seed=session.seed, epoch=session.epoch, steps=steps, kv_context=kv_context)
        return session, self._carry_out(slot, session.open(reading.notice))

    def _control(self, command: SetPrompt | Pause | Resume | Reset | Close | Shown) -> list[Event]:
        slot = self._slots.get(command.session)
        if slot is None and isinstance(command, Shown):
            return []  # a report that crossed with the session's end
        if slot is None:
            known = ", ".join(repr(name) for name in self._slots) or "none"
            raise RequestError("session", f"there is no session {command.session!r}; open ones: {known}")
        session = self._sessions[slot]
        match command:
            case SetPrompt():
                reading = self._read(command.prompt, session.text)
                return self._carry_out(slot, session.set_prompt(reading.text, reading.notice, command.request))
            case Pause() | Resume():
                return self._carry_out(slot, session.set_paused(isinstance(command, Pause)))
            case Reset():
                _check_seed(command.seed)
                return self._carry_out(slot, session.reset(command.seed, command.request))
            case Shown():
                return self._carry_out(slot, session.shown(command.frames))
            case Close():
                return self._close(command.session)

    def _close(self, name: str) -> list[Event]:
        slot = self._slots.pop(name)
        session = self._sessions.pop(slot)
        self._next_epoch[slot] = session.epoch + 1
        return self._carry_out(slot, session.close())

    def _read(self, prompt: str, previous: str | None) -> Reading:
        _check_prompt(prompt)
        return self._pipeline.text.read(prompt, previous)

    # ---- what sessions want -------------------------------------------------------------------------------------

    def _number(self, made: Made) -> list[Event]:
        session = self._sessions.get(made.session)
        if session is None:
            return []
        outputs = session.made(
            epoch=made.epoch,
            chunk=made.chunk,
            pictures=made.pictures,
            chunk_s=made.chunk_s if made.last else None,
        )
        return self._carry_out(made.session, outputs)

    def _carry_out(self, slot: int, outputs: Iterable[Output]) -> list[Event]:
        """Do the actions among `outputs`; returns the events."""
        events: list[Event] = []
        pipeline = self._pipeline
        for output in outputs:
            match output:
                case UseText():
                    pipeline.set_conditioning(slot, pipeline.text.encode(output.text), epoch=output.epoch)
                case StartAfresh():
                    conditioning = pipeline.text.encode(output.text)
                    pipeline.reset(slot, conditioning, seed=output.seed, epoch=output.epoch)
                case Hold():
                    pipeline.set_paused(slot, output.paused)
                case Allow():
                    pipeline.set_room(slot, max(0, output.frames))
                case End():
                    pipeline.close_session(slot)
                case _:
                    events.append(output)
        return events
