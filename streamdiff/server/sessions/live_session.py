"""One session on the web side: engine events in, receipts and state out to those connected, commands to the engine.

Knows nothing about HTTP, SDP or peer connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.core import PROMPT_POLICIES
from streamdiff.engine import messages
from streamdiff.engine.features import NOTHING, Features
from streamdiff.engine.messages import DEFAULT_STRENGTH, Command, Data, FrameBatch, Pictures, Ready
from streamdiff.engine.timeline import TimedChange, coming
from streamdiff.errors import EngineFailure, RequestError
from streamdiff.server.auth import Tokens
from streamdiff.server.load import UNLIMITED, Lifetime, LoadLimit, ViewerDemand
from streamdiff.server.media.playback import Playback
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.peers import Rate
from streamdiff.server.problem import Problem, Unavailable
from streamdiff.server.sessions import control
from streamdiff.server.sessions.control import ControlError, ControlMessage, ControlsMessage, EngineStatus, Id, Receipt
from streamdiff.server.sessions.steering import Steering
from streamdiff.server.sessions.video_input import VideoInput
from streamdiff.server.sessions.wheel import BlockedWords, Watcher, Wheel
from streamdiff.snapshot_header import SavedStream

logger = logging.getLogger(__name__)

STALLED_S = 2.0
OPENING = "open"
"""`Open.request`: a refusal that has it is that of the session, others are of requests to it."""
_HERE = control.FpsMessage | control.AdaptiveMessage | control.HoldMessage
"""What the engine is not asked for."""
Mailbox = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class StreamSpec:
    """Initial settings of a session; None means the engine's default. `fps`: frames shown per second. `image`: the
    picture that it begins with, see `messages.Open`. `features` replace the image, the prompt, or a video. `adaptive`:
    whether its steps and frame rate are reduced under load."""

    prompt: str
    seed: int
    fps: float
    steps: int | None = None
    kv_context: str | None = None
    image: Pictures | None = None
    features: Features = NOTHING
    adaptive: bool = False

    def resumed(self, saved: SavedStream, prompt: str | None, steps: int | None = None) -> StreamSpec:
        """The spec of a session that resumes from a snapshot, with what was saved; a prompt and steps may replace
        it."""
        prompt, steps = saved.text if prompt is None else prompt, saved.steps if steps is None else steps
        return replace(self, prompt=prompt, steps=steps, seed=saved.seed, kv_context=saved.kv_context)


class LiveSession:
    """An open session. Lives on the event loop.

    Its parts: `playback` (pacer and encoders), `input` (the video that feeds it), `peers` (who gets its messages),
    `lifetime` (when it ends by itself).
    """

    tokens: Tokens | None = None
    """Tokens to watch and to control it, beside the server's; None: it has none, see `auth.role_of`."""
    input: VideoInput | None = None
    """The video that feeds it."""
    kept: tuple[int, int] | None = None
    """The first chunk that it can be rewound to, and the latest that is kept."""
    chunk: int = -1
    """The latest that was made."""
    timeline: Sequence[TimedChange] = ()
    """Changes that were posted; their chunks count from `timeline_begin` on."""
    timeline_begin: int = 0

    def __init__(
        self,
        id: str,
        spec: StreamSpec,
        config: Config,
        ready: Ready,
        send: Callable[[Command], Awaitable[None]],
        metrics: Metrics,
        no_time: Callable[[ViewerDemand], Unavailable | None],
        occupancy: Callable[[], Sequence[float]],
        words: BlockedWords,
    ) -> None:
        """`send` hands a command to the engine; `no_time` says why the session cannot have what it asks for; None: it
        can; `occupancy`: what share of the time, 0 to 1, each rank was at work."""
        self.id = id
        self._config, self._ready, self._metrics = config, ready, metrics
        self._send, self._no_time, self._occupancy = send, no_time, occupancy
        # What it shows.
        self.prompt, self.seed, self.image, self.features = spec.prompt, spec.seed, spec.image, spec.features
        self.begins_with_image = spec.image is not None
        self.kv_context = ready.kv_context if spec.kv_context is None else spec.kv_context
        self.text, self.notice, self.switches = "", "", PROMPT_POLICIES
        self.paused = self.closed = False  # closed, or about to be: nobody may join
        self.rev = self.resets = 0
        """Revision of the state, which goes up with every request; and how often its stream has begun again."""
        # Steps: in force, as requested (`demand`), and as the engine was sent last.
        self.steps = self._sent_steps = ready.steps if spec.steps is None else spec.steps
        self.limit, self._demand = UNLIMITED, ViewerDemand(self.steps, spec.fps, spec.adaptive)
        # The engine.
        self.engine = EngineStatus()
        self.place = "none"
        """Where its caches lie: `device`, `host` (memory) or `disk`; `none` while the engine has not opened it."""
        self.epoch = -1
        """The latest one that the engine reported."""
        self._latest_shown_epoch = 0
        self.asked_s = self.reserved_until_s = float("-inf")
        """When the engine was asked last to open it; until when it counts as playing, although it has no viewers."""
        self._sent_active: tuple[bool, bool] | None = None  # active, and whether to be swapped out
        self._asked = itertools.count(1)
        self._answers: dict[str, asyncio.Future[Any]] = {}
        """What is waited for: that it is open, a snapshot, the first receipt of an owner's request."""
        # Who may do what, and for how long.
        self.lifetime = Lifetime(clock.monotonic_s())
        self.peers: dict[str, tuple[Mailbox, bool, Watcher]] = {}
        """By name: how a peer is sent a message, whether it may control the session, and who it is at the wheel."""
        self._requests = control.RequestTracker()
        # Figures.
        self._made, self._shown, self._repeated, self._dropped = Rate(), Rate(), CounterDelta(), CounterDelta()
        self._opening_s: float | None = None  # when `Open` was sent, until the first frame is made
        self._chunk_s: float | None = None
        self._lag_s: float | None = None
        self.playback = Playback(id, spec.fps, config, ready, metrics, self._on_shown, send, self.send_active)
        self.strength, self.steering, self.loras = DEFAULT_STRENGTH, Steering(id, send), dict[str, float]()
        """Noise that is mixed with its video input; the controls that are held; scales of LoRAs, by name."""
        self.wheel = Wheel(id, config.serve.wheel_idle_s, words, self.broadcast)

    @property
    def fps(self) -> float:
        """Frames shown per second."""
        return self.playback.fps

    def demand(self, now_s: float) -> ViewerDemand:
        """What its viewers requested, with `plays` as of `now_s`."""
        return replace(self._demand, plays=self.plays(now_s))

    @property
    def opened(self) -> bool:
        """Whether the engine has opened it."""
        return self.place != "none"

    @property
    def watched(self) -> bool:
        """Whether it has viewers or outputs that receive the video."""
        return bool(self.playback.codecs)

    @property
    def idle(self) -> bool:
        """Whether the media clock is held, as it is paused or has no viewers: no further frames are needed."""
        return self.playback.pacer.held

    def plays(self, now_s: float) -> bool:
        """Whether it takes engine time: watched, not yet idle, or reserved. Others take memory only."""
        return self.watched or not self.idle or now_s < self.reserved_until_s

    # ---- on the engine ------------------------------------------------------------------------------------------

    async def ask_open(self, snapshot: Data | None = None, **more: Any) -> None:
        """Send `Open` to the engine, with epoch and frame numbers that continue those of an engine before, with
        `snapshot` to resume from it, and with `more` fields. Does nothing once the session has ended.

        Raises:
            EngineFailure: the engine has ended.
        """
        if self.closed:
            return
        self._answers[OPENING] = asyncio.get_running_loop().create_future()
        playback, self._sent_active, self.asked_s = self.playback, None, clock.monotonic_s()
        self.steps = self._sent_steps = self.limit.steps_of(self._demand.steps)
        if self.epoch < 0:
            self._opening_s = self.asked_s
        text = self.text or self.prompt  # as it was read last: words that said nothing then say nothing now
        if not text and snapshot is None and self.features.prompt_embeds is None:
            text = self.prompt = self._config.session.prompt  # that of the snapshot it was opened from were features
        past = (self.epoch + 1, playback.made_frames, playback.passed_frames)
        how = (text, self.seed, self.steps, self.kv_context, playback.ahead_frames, *past)
        given: dict[str, Any] = {"loras": self.loras if self.epoch >= 0 else None}  # else what the snapshot has
        given |= self.features.fields() if snapshot is None else {}
        self.resets += snapshot is None
        about: dict[str, Any] = {"active": not self.idle, "request": OPENING, "snapshot": snapshot, **given, **more}
        await self._send(messages.Open(self.id, *how, image=self.image, **about))
        if self.paused and snapshot is None:
            await self.send_paused()
        if self.input is not None and self.input.begun:
            await self._send(messages.SetInput(self.id, self.strength))

    async def wait_opened(self, timeout_s: float) -> None:
        """Wait until the engine has answered the latest `ask_open`.

        Raises:
            RequestError: it refused; EngineFailure: it has ended; TimeoutError: it did not answer in time.
        """
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._answers[OPENING])

    @property
    def may_be_open(self) -> bool:
        """Whether the engine has opened it, or has yet to answer."""
        return self.opened or (OPENING in self._answers and not self._answers[OPENING].done())

    async def ask(self, command: messages.Save | messages.GetLog | messages.SetTimeline, timeout_s: float) -> Any:
        """What the engine answers to a command: the content of a snapshot or a log as it is now, or an event.

        Raises:
            RequestError: the engine cannot do it; says why.
            EngineFailure: the engine has ended. StreamEnded: the session has.
            TimeoutError: it did not answer in time.
        """
        request = f"ask {next(self._asked)}"
        with self._answer_to(request) as answer:
            async with asyncio.timeout(timeout_s):
                await self._send(replace(command, request=request))
                return await answer

    @contextmanager
    def _answer_to(self, name: str) -> Iterator[asyncio.Future[Any]]:
        """Context manager: a future of the first answer of that name. Mutates: self."""
        self._answers[name] = future = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._answers[name]

    def _settle(self, name: str, answer: object) -> bool:
        """Resolve a waiting request with its answer, or an error to raise; False where nobody asked for one."""
        if (future := self._answers.get(name)) is None:
            return False
        if not future.done():
            if isinstance(answer, Exception):
                future.set_exception(answer)
                future.exception()  # marks it retrieved: there may be no waiter any more
            else:
                future.set_result(answer)
        return True

    async def send_active(self) -> None:
        """Send `SetActive` where it has changed: active unless idle, to be swapped out if idle for
        `serve.pause_after_s`. Does nothing before the engine has opened the session."""
        now_s, active = clock.monotonic_s(), not self.idle
        self.lifetime.watch(self.watched, active, now_s)
        since_s = self.lifetime.idle_since_s
        wanted = active, not active and (since_s is None or now_s - since_s >= self._config.serve.pause_after_s)
        if self.opened and wanted != self._sent_active:
            self._sent_active = wanted
            await self._send(messages.SetActive(self.id, *wanted))

    async def send_paused(self) -> None:
        """Send `SetPaused`, as a snapshot may have the other state."""
        with suppress(EngineFailure):  # `ask_open` sends it to the next engine
            await self._send(messages.SetPaused(self.id, self.paused))

    def engine_lost(self, engine: EngineStatus) -> None:
        """The engine has ended: refuse the requests that ended with it. The last picture stays; `ask_open` continues.

        Mutates: self.
        """
        self.engine, self.place, self.kept, self.timeline = engine, "none", None, ()
        for name in self._answers:
            of_engine = name == OPENING or name.startswith("ask ")
            self._settle(name, EngineFailure(engine.reason) if of_engine else self._unavailable(None))
        why = engine.message(may_control=True, consequence=", and this was not taken before")
        carried = self.epoch + 1 if engine.state == "restarting" else None
        self.steering.forget()
        self._deliver(self._requests.engine_lost(carried, self.playback.made_frames, why, clock.monotonic_s()))
        self._send_state()

    def wait_for_memory(self, reason: str) -> None:
        """The engine has no memory to open it again, and `ask_open` is to be called once more. Mutates: self."""
        self.engine = EngineStatus("waiting", reason)
        self._send_state()

    def _unavailable(self, id: Id) -> ControlError:
        code = "engine_ended" if self.engine.state == "failed" else self.engine.code
        why = self.engine.unavailable()
        return ControlError(code, why.detail, id=id, headers=why.headers)

    async def close(self) -> None:
        """End its threads and tasks; the engine's session is not closed. Mutates: self."""
        self.closed = True
        self._settle(OPENING, EngineFailure("the session ended before it was opened"))
        for name in self._answers:
            self._settle(name, control.StreamEnded(self.id))
        self.steering.close()
        self.wheel.close()
        if self.input is not None:
            await self.input.close()
        await self.playback.close()
        self._metrics.forget("session", self.id)

    # ---- the engine's events ------------------------------------------------------------------------------------

    def handle(self, event: messages.StreamEvent) -> None:
        """Take one of this session's events. Mutates: self."""
        now_s = clock.monotonic_s()
        match event:
            case FrameBatch():
                self.chunk = event.chunk
                self.playback.push(event, now_s)
                self._made.add(len(event.pictures), now_s)
                self._metrics.made.labels(self.id).inc(len(event.pictures))
                if self._opening_s is not None:
                    self._metrics.session_first_s.observe(now_s - self._opening_s)
                    self._opening_s = None
                if event.chunk_s is not None:
                    self._chunk_s = event.chunk_s
                    self._metrics.chunk_s.labels(self.id).observe(event.chunk_s)
            case messages.Opened():
                self.engine, self.place, self.epoch = EngineStatus(), "device", event.epoch
                self.begins_with_image, self.loras = event.image, event.loras
                self.playback.progressed.set()
                self._settle(OPENING, None)
                self.text, self.notice, self.switches = event.text, event.notice or self.notice, event.switches
                self._send_state()
            case messages.Accepted() if not self._settle(event.request, event):
                self._handle_accepted(event, now_s)
            case messages.Applied():
                if event.skip:
                    self.playback.clear_before(event.epoch, reset=False)
                self._deliver(self._requests.applied(event.epoch, event.first_frame, now_s, event.chunk))
            case messages.ControlsApplied(requests=names, chunk=chunk, first_frame=frame):
                self._deliver(self._requests.controls_applied(names, frame, now_s, chunk))
            case messages.Saved():
                self._settle(event.request, event.data)
            case messages.Refused(request=request, field=field, reason=reason):
                if self._settle(request, RequestError(field, reason, event.code)):  # to open, or to save
                    return
                if isinstance(self._requests.find(request), control.StepsMessage):
                    self._demand, self._sent_steps = replace(self._demand, steps=self.steps), self.steps
                self._deliver(self._requests.refused(request, field, reason, now_s))
            case messages.InputUsed() if (source := self.input) is not None:
                failed, source.used = event.fault and not source.used.fault, event
                if failed:
                    logger.warning("The video for session %s cannot be encoded: %s.", self.id, event.fault)
                    self._send_state()
                    source.end_soon("encoder")
            case messages.Swapped():
                self.place = event.place
            case messages.Kept():
                self.kept = event.chunks
                self.broadcast({"type": "kept", "kept": self.kept})
            case messages.Closed():
                self.place = "none"

    def _handle_accepted(self, event: messages.Accepted, now_s: float) -> None:
        self.epoch = event.epoch
        message = self._requests.find(event.request)
        resets = isinstance(message, control.ResetMessage) or getattr(message, "switch", "") == "reset"
        if resets or isinstance(message, control.RewindMessage):
            self.playback.clear_before(event.epoch)
            self.resets += 1
            self.chunk, self.timeline_begin = -1, 0
        match message:
            case control.ResetMessage(seed=seed) as reset:
                self.seed = self.seed if seed is None else seed
                if isinstance(reset, control.PictureReset):
                    self.image, self.begins_with_image = reset.picture, reset.picture is not None
                    self.features = self.features.without("image_latents")
                    if self.begins_with_image:
                        self.features = self.features.without("video_latents")
            case control.PromptMessage(prompt=prompt):
                self.prompt, self.features = prompt, self.features.without("prompt_embeds")
            case control.RewindMessage(chunk=chunk):
                self.prompt, self.timeline = event.text or self.prompt, ()
                self.broadcast({"type": "rewound", "chunk": chunk})
            case control.StepsMessage():
                self.steps = self._sent_steps
            case control.StrengthMessage(strength=strength):
                self.strength = strength
        self.loras = self.loras if event.loras is None else event.loras
        if event.text:  # what says nothing of the prompt leaves the remark on it too
            self.text, self.notice = event.text, event.notice
            self.prompt = self.prompt if event.request else event.text  # of the timeline
        self._deliver(self._requests.accepted(event.request, event.epoch, event.text, event.notice, now_s))
        if not isinstance(message, ControlsMessage):  # the state does not tell what is held
            self._send_state()

    def _on_shown(self, frame: int, epoch: int, pts: int) -> None:
        """A new frame is on show. Mutates: self."""
        if self.closed:  # the pacer's thread may be a frame behind
            return
        now_s = clock.monotonic_s()
        self._latest_shown_epoch = epoch
        self._shown.add(1, now_s)
        self._metrics.shown.labels(self.id).inc()
        self._deliver(self._requests.shown(frame, epoch, now_s, pts))

    # ---- the video that feeds it --------------------------------------------------------------------------------

    def take_input(self, kind: str) -> VideoInput:
        """A new input, called `kind` in messages; `VideoInput.begin` starts it. Mutates: self.

        Raises:
            ControlError: there is another.
        """
        if self.input is not None:
            end = f"DELETE /api/sessions/{self.id}/input ends that"
            message = f"The session is fed already, by a {self.input.kind}; {end}. Or open a session of your own."
            raise ControlError("fed", message, "input")
        size = self._ready.width, self._ready.height
        self.input = source = VideoInput(
            kind, size, lambda: self.fps, self._feed, lambda: not self.idle, lambda reason: self.end_input(source)
        )
        return source

    async def end_input(self, source: VideoInput) -> None:
        """End an input: the session continues with its prompt only, unless it has another by now. Mutates: self."""
        await source.close()
        if source is not self.input:
            return
        self.input = None
        if source.begun:
            with suppress(EngineFailure):  # `ask_open` sends none to the next one
                await self._send(messages.SetInput(self.id, None))
            self._send_state()

    async def _feed(self, frames: Pictures) -> None:
        with suppress(EngineFailure):  # the next one gets what comes then
            await self._send(messages.InputFrames(self.id, frames))

    # ---- requests -----------------------------------------------------------------------------------------------

    async def control(self, message: ControlMessage, owner: str) -> str:
        """Carry out a valid message of `owner`; returns the request's name. Its receipts follow.

        Raises:
            ControlError: the session has changed since the revision it is for, or cannot do it, or has no engine.
            EngineFailure: the engine has ended.
        """
        self.check([message])
        if isinstance(message, control.PromptMessage) and message.switch is None:
            message = message.model_copy(update={"switch": self.switches[0]})
        self._demand = control.demand_after(self._demand, message)
        if isinstance(message, ControlsMessage):  # with an id, or where an answer is waited for, it has receipts
            self.playback.steer()
            answered = message.id is not None or owner in self._answers
            request = self._requests.begin(message, owner, clock.monotonic_s()) if answered else ""
            await self.steering.hold(owner, message.values, request)
            return request
        less = control.load_limited_fields(message, self.limit)
        request = self._requests.begin(message, owner, clock.monotonic_s(), **less)
        self.rev += isinstance(message, control.ChangeMessage)
        match message:
            case control.PromptMessage(prompt=prompt, switch=switch):
                # Video is shown as it came in, or was given: frames that are skipped would be missing at its end.
                # And what is steered is seen without a gap.
                follows = self.steering.begun or self.input is not None or self.features.video_latents is not None
                skip = switch != "reset" and not follows and self.playback.may_skip()
                how = switch or "", skip, message.over, message.along
                await self._send(messages.SetPrompt(self.id, prompt, request, *how))
            case control.ResetMessage(seed=seed):
                image = message.picture if isinstance(message, control.PictureReset) else None
                none = isinstance(message, control.PictureReset) and image is None
                await self._send(messages.Reset(self.id, seed, request, image, no_image=none))
            case control.RewindMessage(chunk=chunk):
                await self._send(messages.Rewind(self.id, chunk, self._sent_steps, request))
            case control.StepsMessage(steps=steps):
                await self._send_steps(self.limit.steps_of(steps), request)
            case control.LoraMessage(name=name, scale=scale, over=over):
                await self._send(messages.SetLora(self.id, name, scale, over, request))
            case control.StrengthMessage(strength=strength):
                await self._send(messages.SetInput(self.id, strength, request))
            case control.FpsMessage(fps=fps):
                self.playback.set_fps(fps)
                await self._show_fps()
            case control.AdaptiveMessage():
                self._send_state()
            case control.HoldMessage():
                await self._set_paused(message.type == "pause")
        if isinstance(message, control.ResetMessage | control.RewindMessage) and self.paused:
            await self._set_paused(False)
        if isinstance(message, _HERE):
            now_s = clock.monotonic_s()
            self._deliver(self._requests.accepted(request, self._latest_shown_epoch, "", "", now_s))
            self._requests.forget(request)
        return request

    async def control_and_wait(self, message: ControlMessage, owner: str, timeout_s: float) -> Receipt:
        """Like `control`, and wait for the engine's answer: a receipt `accepted`; `asked` when it has not answered
        after `timeout_s`, as while a large text encoder reads the prompt: it will be carried out later.

        Raises:
            Problem: 504, the engine took no command in that time; 503, it has ended; 422, code `refused`, it refused.
            ControlError: see `control`. StreamEnded: the session has ended.
        """
        request, begun_s = "", clock.monotonic_s()
        with self._answer_to(owner) as answer:
            try:
                async with asyncio.timeout(timeout_s):
                    request = await self.control(message, owner)
                    receipt: Receipt = await answer
            except TimeoutError as error:
                if not request:
                    text = f"The engine took no command for {timeout_s:g} s; this one may still be carried out."
                    raise Problem(504, text, code="engine") from error
                return Receipt(request, owner, message, begun_s, lag_s=timeout_s)
            except EngineFailure as error:
                raise Unavailable("engine", f"The engine stopped: {error}", 5) from error
        if receipt.stage == "refused":
            raise Problem(422, receipt.reason, code="refused", field=receipt.field, id=receipt.control.id)
        return receipt

    def check(self, messages: Sequence[ControlMessage]) -> None:
        """Check that `messages`, carried out in this order, would not be refused here; the engine may still refuse.

        Raises:
            ControlError: see `control`.
        """
        demand = self._demand
        for message in messages:
            if not self.engine.running:
                raise self._unavailable(message.id)
            if isinstance(message, control.ChangeMessage) and message.if_rev not in (None, self.rev):
                now = f"its state has revision {self.rev}, the request is for {message.if_rev}"
                raise ControlError("conflict", f"The session has changed: {now}.", "if_rev", message.id)
            control.check_value(message, self._ready, self.switches, fed=self.input is not None)
            before, demand = demand, control.demand_after(demand, message)
            more = demand.fps > before.fps or demand.steps > before.steps or demand.adaptive < before.adaptive
            if more and (no_time := self._no_time(demand)) is not None:
                raise ControlError("no_capacity", no_time.detail, message.type, message.id, no_time.headers)

    async def limit_to(self, limit: LoadLimit) -> None:
        """Apply a load limit: send the engine its steps, play at its frame rate, broadcast the state. Mutates: self.

        Raises:
            EngineFailure: the engine has ended.
        """
        slower, self.limit = limit.rate != self.limit.rate, limit
        steps = limit.steps_of(self._demand.steps)
        if steps != self._sent_steps and self.engine.state != "waiting":  # `ask_open` sends them
            message = control.StepsMessage(type="steps", steps=steps)
            request = self._requests.begin(message, control.LOAD, clock.monotonic_s(), steps=steps, reason=control.LOAD)
            await self._send_steps(steps, request)
        if slower:
            await self._show_fps()

    async def _send_steps(self, steps: int, request: str) -> None:
        self._sent_steps = steps
        await self._send(messages.SetSteps(self.id, steps, request))

    async def _show_fps(self) -> None:
        self.playback.show_fps(self.limit.fps_of(self._demand.fps))
        await self._send(messages.SetMaxAhead(self.id, self.playback.ahead_frames))
        self._send_state()

    async def _set_paused(self, paused: bool) -> None:
        await self._send(messages.SetPaused(self.id, paused))
        self.paused = paused
        self.playback.pacer.set_paused(paused)
        await self.send_active()
        self._send_state()

    # ---- to those connected -------------------------------------------------------------------------------------

    def join(self, peer: str, mailbox: Mailbox, may_control: bool = True) -> Watcher:
        """Send messages to `peer` from now on, the first with the state. Mutates: self."""
        watcher = self.wheel.new(may_control, peer)
        self.peers[peer] = mailbox, may_control, watcher
        about = {"role": "controller" if may_control else "viewer", "watcher": watcher.id, "wheel_token": watcher.token}
        mailbox({"type": "hello", "protocol": 1, "viewer": peer, **about, "state": self.state(may_control)})
        return watcher

    def leave(self, peer: str) -> None:
        """Send `peer` no more messages. Mutates: self."""
        if peer in self.peers:
            self.wheel.gone(self.peers.pop(peer)[2])
        self.steering.leave(peer)

    def broadcast(self, message: dict[str, Any], to_viewers: dict[str, Any] | None = None) -> None:
        """Send a message to all peers; `to_viewers`: instead of it, to those that may not control."""
        for mailbox, may_control, _ in list(self.peers.values()):
            mailbox(message if to_viewers is None or may_control else to_viewers)

    def show_timeline(self, changes: Sequence[TimedChange], begin: int) -> None:
        """It plays these changes, from chunk `begin` on: say so. Mutates: self."""
        self.timeline, self.timeline_begin = changes, begin
        self._send_state()

    def _send_state(self) -> None:
        self.broadcast(self.state(may_control=True), self.state(may_control=False))

    def _deliver(self, receipts: Sequence[Receipt]) -> None:
        """Send receipts to the peers that made the requests, and count them. Mutates: self."""
        for receipt in receipts:
            if receipt.owner == control.LOAD:
                self.broadcast(receipt.message())
                continue
            kind, stage, lag_s = receipt.control.type, receipt.stage, receipt.lag_s
            if stage in ("accepted", "refused", "superseded"):
                self._metrics.controls.labels(kind, stage).inc()
            waited = stage != "accepted" and receipt.begun_s < self.lifetime.plays_since_s  # for a viewer, or paused
            if stage in ("accepted", "applied", "shown") and kind in ("prompt", "reset", "control") and not waited:
                self._metrics.request_lag_s.labels(kind, stage).observe(lag_s)
            self._lag_s = lag_s if stage == "shown" and kind != "control" and not waited else self._lag_s
            if stage in ("accepted", "refused"):
                self._settle(receipt.owner, receipt)
            if receipt.owner in self.peers:
                self.peers[receipt.owner][0](receipt.message())

    def state(self, may_control: bool) -> dict[str, Any]:
        """All that a page needs to draw itself, JSON-able; for a caller that may control the session, or may not."""
        fmt, demand = self.playback.format, self._demand
        fps = self.limit.fps_of(demand.fps)
        names = ("prompt", "text", "notice", "seed", "paused", "place", "rev", "kv_context", "steps", "loras")
        return {
            "type": "state",
            "session": self.id,
            **{name: getattr(self, name) for name in names},
            "image": self.begins_with_image,
            "features": list(self.features.names),
            "input": None if self.input is None else {"strength": self.strength, **self.input.state(may_control)},
            "engine": self.engine.state,
            "engine_reason": self.engine.reason_for(may_control),
            "adaptive": demand.adaptive,
            "reason": control.LOAD if self.limit.steps_of(demand.steps) < demand.steps or fps < demand.fps else "",
            "asked_steps": demand.steps,
            "fps": fps,
            "asked_fps": demand.fps,
            "steps_known": list(self._ready.steps_known),
            "switches": list(self.switches),
            "loras_known": list(self._ready.loras),
            "controls": [asdict(each) for each in self._ready.controls],
            "wheel": self.wheel.state(),
            "kept": self.kept,
            "timeline": coming(self.timeline, self.timeline_begin, self.chunk),
            "native_fps": self._ready.native_fps,
            **{name: getattr(fmt, name) for name in ("width", "height", "scale")},
            "bitrate": fmt.bitrate_bps,
            "codecs": list(self.playback.codecs),
        }

    # ---- figures ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Live figures, JSON-able: among others frames per second shown and made, a chunk's and a request's time; None
        where nothing was measured yet."""
        now_s, playback, progress = clock.monotonic_s(), self.playback, self.playback.pacer.progress()
        return {
            "type": "stats",
            "shown_fps": round(self._shown.per_s(now_s), 1),
            "made_fps": round(self._made.per_s(now_s), 1),
            "chunk_ms": None if self._chunk_s is None else round(self._chunk_s * 1000),
            "prompt_lag_ms": None if self._lag_s is None else round(self._lag_s * 1000),
            "encoder_dropped": playback.dropped,
            "chunk": self.chunk,
            **{name: getattr(progress, name) for name in ("frame", "buffered", "repeated", "dropped", "missed")},
            "occupancy": [round(share, 3) for share in self._occupancy()],
            "input": None if self.input is None else self.input.figures(),
            "stalled": self.stalled_s() > STALLED_S,
            "lead_ms": round(playback.lead.lead_s * 1000),
        }

    def stalled_s(self) -> float:
        """Seconds since the engine made a frame, while it should; 0 when it need not."""
        swapped_out = self.idle and self.place != "device"
        holds = self.input is not None and self.input.holds
        return 0.0 if self.paused or swapped_out or holds else self.playback.stalled_s()

    def update_metrics(self) -> None:
        """Copy figures that other objects hold into the metrics. Mutates: self, the metrics."""
        if self.closed:
            return
        metrics, progress = self._metrics, self.playback.pacer.progress()
        metrics.repeated.labels(self.id).inc(self._repeated.increase(progress.repeated))
        metrics.dropped.labels(self.id).inc(self._dropped.increase(progress.dropped))
        for gauge, value in (
            (metrics.buffered, progress.buffered),
            (metrics.unanswered, self._requests.unanswered),
            (metrics.encoder_waiting, self.playback.waiting),
            (metrics.steps, self.steps),
            (metrics.asked_steps, self._demand.steps),
            (metrics.fps, self.fps),
            (metrics.asked_fps, self._demand.fps),
        ):
            gauge.labels(self.id).set(value)
