"""One session on the web side: engine events in, receipts and state out to those connected, commands to the engine.

Knows nothing about HTTP, SDP or peer connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine import messages
from streamdiff.engine.messages import Command, Data, FrameBatch, Ready
from streamdiff.errors import EngineFailure, RequestError
from streamdiff.server.auth import Tokens
from streamdiff.server.load import Lifetime, LoadLimit, SessionDemand
from streamdiff.server.metrics import Metrics
from streamdiff.server.sessions import control
from streamdiff.server.sessions.control import ControlError, ControlMessage, Id
from streamdiff.server.sessions.engine_status import EngineStatus, Opening, SnapshotRequests
from streamdiff.server.sessions.playback import Playback
from streamdiff.server.sessions.receipts import LOAD, Mailbox, Receipt, RequestTracker, SessionEnded, Subscribers
from streamdiff.server.sessions.session_input import SessionInput
from streamdiff.server.sessions.session_spec import SessionSpec, demand_after, is_more, load_limited_fields
from streamdiff.server.sessions.state import SessionState

OPENING = "open"
"""`Open.request`: a refusal that has it is that of the session, others are of requests to it."""
_Answer = messages.Opened | messages.Accepted | messages.Applied | messages.Refused | messages.Closed
SessionEvent = _Answer | FrameBatch | messages.InputUsed | messages.Saved | messages.Swapped


class LiveSession(SessionState):
    """An open session. Lives on the event loop."""

    def __init__(
        self,
        id: str,
        spec: SessionSpec,
        config: Config,
        ready: Ready,
        send: Callable[[Command], Awaitable[None]],
        metrics: Metrics,
        may_play: Callable[[SessionDemand], str] = lambda demand: "",
        occupancy: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """`send` hands a command to the engine; `may_play` says why the session cannot have what it asks for, or "" if
        it can; `occupancy`: see `SessionState`."""
        super().__init__(id, spec, ready, metrics, occupancy)
        self._sent_steps = self.steps
        self.tokens: Tokens | None = None
        """Tokens to watch and to control it, beside the server's; None: it has none, see `auth.role_of`."""
        self.lifetime = Lifetime(clock.monotonic_s())
        self.asked_s = float("-inf")  # when the engine was asked last to open it
        self.reserved_until_s = float("-inf")
        """Until then it counts as playing, although it has no viewers."""
        self._last_active: tuple[bool, bool] | None = None  # active, and whether to be swapped out, as sent last
        self.opened = self.closed = False  # closed: or about to be, nobody may join
        self.epoch = -1
        """The latest one that the engine reported."""
        self.resets = 0  # how often its stream has begun afresh
        self._latest_shown_epoch = 0
        self._send, self._may_play = send, may_play
        self._default_prompt = config.session.prompt
        self._pause_after_s = config.serve.pause_after_s
        self.subscribers = Subscribers(self._count_receipt)
        self.snapshots = SnapshotRequests(id, send)
        self._requests = RequestTracker()
        self.opening = Opening()
        self.playback = Playback(id, spec.fps, config, ready, metrics, self._take_shown, send, self.tell_active)
        self.input = SessionInput(id, ready, send, lambda: self.fps, lambda: not self.idle, self._send_state)

    @property
    def fps(self) -> float:
        """Frames shown per second."""
        return self.playback.fps

    def demand(self, now_s: float) -> SessionDemand:
        """What its viewers requested, with `plays` as of `now_s`."""
        return replace(self._demand, plays=self.plays(now_s))

    @property
    def watched(self) -> bool:
        """Whether it has viewers or outputs that receive the video."""
        return bool(self.playback.fanout.codecs)

    @property
    def idle(self) -> bool:
        """Whether the media clock is held, as it is paused or has no viewers: no further frames are needed."""
        return self.playback.pacer.held

    def plays(self, now_s: float) -> bool:
        """Whether it takes engine time: watched, not yet idle, or reserved. Others take memory only."""
        return self.watched or not self.idle or now_s < self.reserved_until_s

    async def tell_active(self) -> None:
        """Send `SetActive` where it has changed: active unless idle, to be swapped out if idle for
        `serve.pause_after_s`. Does nothing before the engine has opened the session."""
        now_s, active = clock.monotonic_s(), not self.idle
        self.lifetime.watch(self.watched, now_s)
        since_s = self.lifetime.idle_since_s
        wanted = active, not active and (since_s is None or now_s - since_s >= self._pause_after_s)
        if self.opened and wanted != self._last_active:
            self._last_active = wanted
            await self._send(messages.SetActive(self.id, *wanted))

    async def ask_open(self, snapshot: Data | None = None) -> None:
        """Send `Open` to the engine, with epoch and frame numbers that continue those of an engine before, and with
        `snapshot` to resume from it. Does nothing once the session has ended.

        Raises:
            EngineFailure: the engine has ended.
        """
        if self.closed:
            return
        playback, self._last_active, self.asked_s = self.playback, None, clock.monotonic_s()
        self.steps = self._sent_steps = self.limit.steps_of(self._demand.steps)
        if self.epoch < 0:
            self._opening_s = self.asked_s
        text = self.text or self.prompt  # as it was read last: words that said nothing then say nothing now
        if not text and snapshot is None and self.features.prompt_embeds is None:
            text = self.prompt = self._default_prompt  # that of the snapshot it was opened from were features
        past = (self.epoch + 1, playback.made_frames, playback.passed_frames)
        ahead = playback.ahead_frames
        how = (text, self.seed, self.steps, self.kv_context, ahead, *past)
        self.resets += snapshot is None
        given = self.features.fields() if snapshot is None else {}
        active = not self.idle
        opening = messages.Open(
            self.id, *how, image=self.image, active=active, request=OPENING, snapshot=snapshot, **given
        )
        await self._send(opening)
        if self.paused and snapshot is None:
            await self.tell_paused()
        await self.input.tell()

    async def tell_paused(self) -> None:
        """Send `Pause` or `Resume`, as a snapshot may have the other state."""
        with suppress(EngineFailure):  # the next engine is told
            await self._send(messages.Pause(self.id) if self.paused else messages.Resume(self.id))

    def engine_lost(self, engine: EngineStatus) -> None:
        """The engine has ended: refuse the requests that ended with it. The last picture stays; `ask_open` goes on.

        Mutates: self.
        """
        self.opened, self.engine, self.place = False, engine, "none"
        self.subscribers.fail_pending(lambda: self._unavailable(None))
        self.snapshots.fail(lambda: EngineFailure(engine.reason))
        self.opening.end(EngineFailure(engine.reason))
        self.opening.reset()
        why = engine.message(may_control=True, consequence=", and this was not taken before")
        carried = self.epoch + 1 if engine.state == "restarting" else None
        made_frames = self.playback.made_frames
        self.subscribers.deliver(self._requests.engine_lost(carried, made_frames, why, clock.monotonic_s()))
        self._send_state()

    def wait_for_memory(self, reason: str) -> None:
        """The engine has no memory to open it again, and `ask_open` is to be called once more. Mutates: self."""
        self.engine = EngineStatus("waiting", reason)
        self._send_state()

    def _unavailable(self, id: Id) -> ControlError:
        code = "engine_ended" if self.engine.state == "failed" else self.engine.code
        return ControlError(code, self.engine.message(may_control=True), id=id)

    # ---- the engine's events ------------------------------------------------------------------------------------

    def handle(self, event: SessionEvent) -> None:
        """Take one of this session's events. Mutates: self."""
        now_s = clock.monotonic_s()
        match event:
            case FrameBatch():
                self.playback.push(event, now_s)
                self._count_made(len(event.pictures), event.chunk_s, now_s)
            case messages.Opened():
                self.opened, self.engine, self.place, self.epoch = True, EngineStatus(), "device", event.epoch
                self.begins_with_image = event.image
                self.playback.progressed.set()
                self.opening.end(None)
                self.text, self.notice, self.switches = event.text, event.notice or self.notice, event.switches
                self._send_state()
            case messages.Accepted():
                self._take_accepted(event, now_s)
            case messages.Applied():
                if event.skip:
                    self.playback.clear_before(event.epoch, reset=False)
                self.subscribers.deliver(self._requests.applied(event.epoch, event.first_frame, now_s, event.chunk))
            case messages.Saved() | messages.Refused() if self.snapshots.take(event):
                pass
            case messages.Refused() if not self.opened and event.request == OPENING:
                self.opening.end(RequestError(event.field, event.reason, event.code))
            case messages.Refused():
                if isinstance(self._requests.find(event.request), control.StepsMessage):
                    self._demand = replace(self._demand, steps=self.steps)
                    self._sent_steps = self.steps
                self.subscribers.deliver(self._requests.refused(event.request, event.field, event.reason, now_s))
            case messages.InputUsed():
                self.input.used(event)
            case messages.Swapped():
                self.place = event.place
            case messages.Closed():
                self.opened = False

    def _take_accepted(self, event: messages.Accepted, now_s: float) -> None:
        self.epoch = event.epoch
        match self._requests.find(event.request):
            case control.ResetMessage(seed=seed) as reset:
                self.playback.clear_before(event.epoch)
                self.seed, self.resets = self.seed if seed is None else seed, self.resets + 1
                if isinstance(reset, control.PictureReset):
                    self.image, self.begins_with_image = reset.picture, reset.picture is not None
                    self.features = self.features.without("image_latents")
                    if self.begins_with_image:
                        self.features = self.features.without("video_latents")
            case control.PromptMessage(prompt=prompt, switch=switch):
                self.prompt, self.features = prompt, self.features.without("prompt_embeds")
                if switch == "reset":
                    self.resets += 1
                    self.playback.clear_before(event.epoch)
            case control.StepsMessage():
                self.steps = self._sent_steps
            case control.StrengthMessage(strength=strength):
                self.input.strength = strength
        if event.text:  # what says nothing of the prompt leaves the remark on it too
            self.text, self.notice = event.text, event.notice
        receipts = self._requests.accepted(event.request, event.epoch, event.text, event.notice, now_s)
        self.subscribers.deliver(receipts)
        self._send_state()

    def _take_shown(self, frame: int, epoch: int, pts: int) -> None:
        now_s = clock.monotonic_s()
        self._latest_shown_epoch = epoch
        self._count_shown(now_s)
        self.subscribers.deliver(self._requests.shown(frame, epoch, now_s, pts))

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
        self._demand = demand_after(self._demand, message)
        request = self._requests.begin(message, owner, clock.monotonic_s(), **load_limited_fields(message, self.limit))
        self.rev += isinstance(message, control.ChangeMessage)
        match message:
            case control.PromptMessage(prompt=prompt, switch=switch):
                # Video is shown as it came in, or was given: frames that are skipped would be missing at its end.
                follows = self.input.video_input is not None or self.features.video_latents is not None
                skip = switch != "reset" and not follows and self.playback.may_skip()
                await self._send(messages.SetPrompt(self.id, prompt, request, switch or "", skip))
            case control.ResetMessage(seed=seed):
                image = message.picture if isinstance(message, control.PictureReset) else None
                none = isinstance(message, control.PictureReset) and image is None
                await self._send(messages.Reset(self.id, seed, request, image, no_image=none))
                if self.paused:
                    await self._set_paused(False)
            case control.StepsMessage(steps=steps):
                await self._send_steps(self.limit.steps_of(steps), request)
            case control.StrengthMessage(strength=strength):
                await self._send(messages.SetInput(self.id, strength, request))
            case _:
                if isinstance(message, control.FpsMessage):
                    self.playback.set_fps(message.fps)
                    await self._show_fps()
                elif isinstance(message, control.AdaptiveMessage):
                    self._send_state()
                elif message.type in ("pause", "resume"):
                    await self._set_paused(message.type == "pause")
                # Nothing has to be made for these.
                shown_epoch, now_s = self._latest_shown_epoch, clock.monotonic_s()
                self.subscribers.deliver(self._requests.accepted(request, shown_epoch, "", "", now_s))
                self._requests.forget(request)
        return request

    async def limit_to(self, limit: LoadLimit) -> None:
        """Apply a load limit: send the engine its steps, play at its frame rate, broadcast the state. Mutates: self.

        Raises:
            EngineFailure: the engine has ended.
        """
        slower, self.limit = limit.rate != self.limit.rate, limit
        steps = limit.steps_of(self._demand.steps)
        if steps != self._sent_steps and self.engine.state != "waiting":  # `ask_open` sends them
            message = control.StepsMessage(type="steps", steps=steps)
            request = self._requests.begin(message, LOAD, clock.monotonic_s(), steps=steps, reason=LOAD)
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
            self._check_value(message)
            before, demand = demand, demand_after(demand, message)
            if is_more(demand, before) and (why := self._may_play(demand)):
                raise ControlError("no_capacity", why, message.type, message.id)

    def _check_value(self, message: ControlMessage) -> None:
        """Raises ControlError for what the model or the session cannot do."""
        match message:
            case control.StepsMessage(steps=steps) if why := control.steps_refusal(steps, self._ready):
                raise ControlError("out_of_range", why, "steps", message.id)
            case control.StrengthMessage() if self.input.video_input is None:
                raise ControlError("no_input", "No video feeds the session; send one by WHIP.", "strength", message.id)
            case control.PromptMessage(switch=switch) if switch is not None and switch not in self.switches:
                why = f"`switch` is {switch!r}; this session can do {', '.join(self.switches)}."
                raise ControlError("out_of_range", why, "switch", message.id)

    async def control_and_wait(self, message: ControlMessage, owner: str, timeout_s: float) -> Receipt:
        """Like `control`, and wait for the engine's answer: a receipt `accepted` or `refused`; `asked` when it has not
        answered after `timeout_s`, as while a large text encoder reads the prompt: it will be carried out later.

        Raises:
            TimeoutError: the engine took no command in that time.
            ControlError: see `control`.
            EngineFailure: the engine has ended.
            SessionEnded: the session has.
        """
        request = ""
        with self.subscribers.answer_to(owner) as answer:
            try:
                async with asyncio.timeout(timeout_s):
                    request = await self.control(message, owner)
                    return await answer
            except TimeoutError:
                if not request:
                    raise
                return Receipt(request, owner, message.id, message.type, "asked", timeout_s)

    async def _set_paused(self, paused: bool) -> None:
        await self._send(messages.Pause(self.id) if paused else messages.Resume(self.id))
        self.paused = paused
        self.playback.pacer.set_paused(paused)
        await self.tell_active()
        self._send_state()

    # ---- what there is to see -----------------------------------------------------------------------------------

    def join(self, peer: str, mailbox: Mailbox, may_control: bool = True) -> None:
        """Send messages to `peer` from now on, the first with the state. Mutates: self."""
        self.subscribers.join(peer, mailbox, may_control)
        role = "controller" if may_control else "viewer"
        mailbox({"type": "hello", "protocol": 1, "viewer": peer, "role": role, "state": self.state(may_control)})

    def _send_state(self) -> None:
        self.subscribers.broadcast(self.state(may_control=True), self.state(may_control=False))

    async def close(self) -> None:
        """End its threads and tasks; the engine's session is not closed. Mutates: self."""
        self.closed = True
        self.opening.end(EngineFailure("the session ended before it was opened"))
        ended = partial(SessionEnded, "the session ended before this was answered")
        self.subscribers.fail_pending(ended)
        self.snapshots.fail(ended)
        await self.input.close()
        await self.playback.close()
        self._end_metrics()
