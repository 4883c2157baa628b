"""One session as its viewers see it: the engine's events in, pictures and receipts out, back-pressure in return.

Lives on the event loop. Knows nothing about HTTP, SDP or peer connections: a viewer is a track and a mailbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import (
    SWITCHES,
    Accepted,
    Applied,
    Closed,
    Command,
    Event,
    FrameBatch,
    Open,
    Opened,
    Pause,
    Ready,
    Refused,
    Reset,
    Resume,
    SetLead,
    SetPrompt,
    SetSteps,
)
from streamdiff.errors import EngineFailure, RequestError
from streamdiff.server.auth import Tokens
from streamdiff.server.logging_setup import facts, prompt_log
from streamdiff.server.media.codecs import H264_LIBRARY, Format
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.media.pacer import Pacer
from streamdiff.server.media.playout import PlayoutSlot
from streamdiff.server.media.snapshot import Snapshot
from streamdiff.server.metrics import Metrics
from streamdiff.server.sessions.back_pressure import BackPressure
from streamdiff.server.sessions.control import ControlError, ControlMessage, Id, steps_refusal
from streamdiff.server.sessions.engine_state import LOST, EngineState, lost_message, reason_for
from streamdiff.server.sessions.receipts import Receipt, RequestTracker
from streamdiff.server.sessions.spec import SessionEnded, SessionSpec
from streamdiff.server.sessions.stats import SessionMeter
from streamdiff.server.sessions.subscribers import Mailbox, Subscribers


class LiveSession:
    """Shows one session. `send` hands a command to the engine."""

    def __init__(
        self,
        session: str,
        spec: SessionSpec,
        config: Config,
        ready: Ready,
        send: Callable[[Command], Awaitable[None]],
        metrics: Metrics,
        may_play: Callable[[float, int], str] = lambda fps, steps: "",
        occupancy: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """`may_play` says why the session cannot show so many frames per second, made in so many steps, or "" if it
        can; `occupancy` what share of the time, 0 to 1, each rank of a ring was at work."""
        self.session = session
        self.prompt = spec.prompt
        self.seed = spec.seed
        self.steps = ready.steps if spec.steps is None else spec.steps
        self._model, self._steps_known = ready.model, ready.steps_known
        self.kv_context = ready.kv_context if spec.kv_context is None else spec.kv_context
        self.tokens: Tokens | None = None
        """Who may watch and steer it; None: the server's rules hold."""
        self.rev = 0
        """Goes up with everything that is asked for."""
        self.text = self.notice = ""
        self.switches = SWITCHES
        self.paused = False
        self.opened = False
        self.closed = False  # or about to be: nobody may join
        self.engine: EngineState = "running"
        self.engine_reason = ""
        """Why it does not run; for those who may steer."""
        self._epoch = -1  # the latest one the engine told
        self._made_frames = 0
        self._send = send
        self._meter = SessionMeter(metrics, session)
        self._audience = Subscribers(self._meter)
        self._loop = asyncio.get_running_loop()
        self._may_play, self._occupancy = may_play, occupancy
        self._log_prompts = config.serve.log_prompts
        self._lead_s, self._native_fps = config.playback.lead_s, ready.native_fps
        h264 = H264_LIBRARY.get(config.serve.encoder, "libx264")
        self.format = Format(ready.width, ready.height, spec.fps, config.scale, config.serve.bitrate, h264)
        start = min(ready.chunk_frames, self._lead_frames())
        self._pacer = Pacer(spec.fps, start, self._shown_on_pacer, config.serve.grace_s)
        self.fanout = Fanout(self.format, self._pacer, metrics)
        self.snapshot = Snapshot(self.picture)
        self._book = RequestTracker()
        self._last_made_s = clock.monotonic_s()
        self._latest_shown: tuple[int, int] | None = None
        self._opening: asyncio.Future[None] = self._loop.create_future()
        self._back_pressure = BackPressure(session, lambda: self._pacer.progress().passed, send)

    @property
    def fps(self) -> float:
        """Frames shown per second."""
        return self.format.fps

    @property
    def watched(self) -> bool:
        """Whether somebody gets the pictures."""
        return bool(self.fanout.codecs)

    @property
    def idle(self) -> bool:
        """Whether nothing is shown and so, when the lead is reached, nothing made: paused, or nobody watches."""
        return self._pacer.held

    async def ask_open(self) -> None:
        """Ask the engine for the session; a new engine, where it takes up what the one before has left.

        Raises:
            EngineFailure: the engine has ended.
        """
        if self._epoch < 0:
            self._log(self.prompt)
            self._meter.asked(clock.monotonic_s())
        text = self.text or self.prompt  # as it was read last: words that said nothing then say nothing now
        past = (self._epoch + 1, self._made_frames, self._pacer.progress().passed)
        await self._send(Open(self.session, text, self.seed, self.steps, self.kv_context, self._lead_frames(), *past))
        if self.paused:
            await self._send(Pause(self.session))

    def _log(self, prompt: str) -> None:
        if self._log_prompts:
            prompt_log.info("session %s: prompt %r", self.session, prompt, extra=facts(session=self.session))

    async def wait_open(self, timeout_s: float) -> None:
        """Wait until the engine has opened it.

        Raises:
            RequestError: it refused; TimeoutError: it did not answer in time.
        """
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._opening)

    def _lead_frames(self, fps: float | None = None) -> int:
        return max(1, round(self._lead_s * (fps or self.format.fps)))

    def lost(self, engine: EngineState, reason: str) -> None:
        """The engine has ended: say so, and what becomes of requests. The last picture stays; `ask_open` goes on.

        Mutates: self.
        """
        self.opened, self.engine, self.engine_reason = False, engine, reason
        self._audience.disappoint(lambda: self._down(None))
        if not self._opening.done():
            self._opening.set_exception(EngineFailure(reason))
            self._opening.exception()  # nobody need wait for it
        self._opening = self._loop.create_future()
        why = f"{LOST[engine]}, and this was not taken before: {reason}"
        carried = self._epoch + 1 if engine == "restarting" else None
        self._audience.tell(self._book.engine_lost(carried, self._made_frames, why, clock.monotonic_s()))
        self._tell_state()

    def _down(self, id: Id) -> ControlError:
        code = "restarting" if self.engine == "restarting" else "engine_ended"
        return ControlError(code, lost_message(self.engine, self.engine_reason, may_control=True), id=id)

    # ---- the engine's events ------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Take one of this session's events. Mutates: self."""
        now_s = clock.monotonic_s()
        match event:
            case FrameBatch():
                self._take_frames(event, now_s)
            case Opened():
                self.opened, self.engine, self.engine_reason = True, "running", ""
                self._epoch = event.epoch
                if not self._opening.done():
                    self._opening.set_result(None)
                self.text, self.notice, self.switches = event.text, event.notice or self.notice, event.switches
                self._tell_state()
            case Accepted():
                self._take_accepted(event, now_s)
            case Applied():
                self._audience.tell(self._book.applied(event.epoch, event.first_frame, now_s, event.chunk))
            case Refused() if not self.opened:
                if not self._opening.done():
                    self._opening.set_exception(RequestError(event.field, event.reason, event.code))
                    self._opening.exception()  # nobody need wait for it
            case Refused():
                self._audience.tell(self._book.refused(event.request, event.field, event.reason, now_s))
            case Closed():
                self.opened = False

    def _take_frames(self, batch: FrameBatch, now_s: float) -> None:
        self._pacer.push(batch.first, batch.pictures, batch.epoch)
        self._last_made_s, self._made_frames = now_s, batch.first + len(batch.pictures)
        self._meter.made(len(batch.pictures), batch.chunk_s, now_s)

    def _take_accepted(self, event: Accepted, now_s: float) -> None:
        self._epoch = event.epoch
        control = self._book.find(event.request)
        if control is not None and "reset" in (control.kind, control.switch):
            self._pacer.clear_before(event.epoch)
            self._back_pressure.moved()
            self.seed = self.seed if control.seed is None else control.seed
        if control is not None and control.kind == "prompt":
            self.prompt = control.prompt
        if control is not None and control.kind == "steps":
            self.steps = control.steps
        if event.text:  # what says nothing of the prompt leaves the remark on it too
            self.text, self.notice = event.text, event.notice
        self._audience.tell(self._book.accepted(event.request, event.epoch, event.text, event.notice, now_s))
        self._tell_state()

    # ---- what was shown -----------------------------------------------------------------------------------------

    def _shown_on_pacer(self, due: PlayoutSlot) -> None:
        self._loop.call_soon_threadsafe(self._take_shown, due.frame, due.epoch, due.pts)

    def _take_shown(self, frame: int, epoch: int, pts: int) -> None:
        now_s = clock.monotonic_s()
        self._latest_shown = (frame, epoch)
        self._meter.shown(now_s)
        self._audience.tell(self._book.shown(frame, epoch, now_s, pts))
        self._back_pressure.moved()

    # ---- requests -----------------------------------------------------------------------------------------------

    async def control(self, control: ControlMessage, owner: str) -> str:
        """Carry out a valid message of `owner`; returns the request's name. Its receipts follow.

        Raises:
            ControlError: the session has changed since the revision it is for, or cannot do it, or has no engine.
            EngineFailure: the engine has ended.
        """
        if self.engine != "running":
            raise self._down(control.id)
        if control.if_rev is not None and control.if_rev != self.rev:
            message = (
                f"The session has changed: its state has revision {self.rev}, the request is for {control.if_rev}."
            )
            raise ControlError("conflict", message, "if_rev", control.id)
        self._check_work(control)
        if control.kind == "prompt" and not control.switch:
            control = replace(control, switch=self.switches[0])
        request = self._book.begin(control, owner, clock.monotonic_s())
        self.rev += control.changes
        match control.kind:
            case "prompt":
                self._log(control.prompt)
                await self._send(SetPrompt(self.session, control.prompt, request, control.switch))
            case "reset":
                await self._send(Reset(self.session, control.seed, request))
                if self.paused:
                    await self._set_paused(False)
            case "steps":
                await self._send(SetSteps(self.session, control.steps, request))
            case "fps":
                await self._set_fps(control.fps)
                self._done_at_once(request)
            case "pause" | "resume":
                await self._set_paused(control.kind == "pause")
                self._done_at_once(request)
            case "get" | "ping":
                self._done_at_once(request)
        return request

    def _check_work(self, control: ControlMessage) -> None:
        """Raises ControlError for steps that the model does not have, or for more work than there is time for."""
        if control.kind == "steps" and (why := steps_refusal(control.steps, self._steps_known, self._model)):
            raise ControlError("out_of_range", why, "steps", control.id)
        fps, steps = control.fps or self.fps, control.steps or self.steps
        if (fps > self.fps or steps > self.steps) and (why := self._may_play(fps, steps)):
            raise ControlError("no_capacity", why, control.kind, control.id)

    async def control_and_wait(self, control: ControlMessage, owner: str, timeout_s: float) -> Receipt:
        """Like `control`, and wait for the engine's answer: a receipt `accepted` or `refused`; `asked` when it has not
        answered after `timeout_s`, as while a large text encoder reads the prompt: it will be carried out later.

        Raises:
            TimeoutError: the engine took no command in that time.
            ControlError: see `control`.
            EngineFailure: the engine has ended.
            SessionEnded: the session has.
        """
        answer = self._audience.expect(owner)
        request = ""
        try:
            async with asyncio.timeout(timeout_s):
                request = await self.control(control, owner)
                return await answer
        except TimeoutError:
            if not request:
                raise
            return Receipt(request, owner, control.id, control.kind, "asked", timeout_s)
        finally:
            self._audience.forget(owner)

    async def _set_fps(self, fps: float) -> None:
        await self._send(SetLead(self.session, self._lead_frames(fps)))
        self.format = replace(self.format, fps=fps)
        self._pacer.set_fps(fps)
        self.fanout.set_format(self.format)
        self._tell_state()

    async def _set_paused(self, paused: bool) -> None:
        await self._send(Pause(self.session) if paused else Resume(self.session))
        self.paused = paused
        self._pacer.set_paused(paused)
        self._tell_state()

    def _done_at_once(self, request: str) -> None:
        epoch = self._latest_shown[1] if self._latest_shown else 0
        self._audience.tell(self._book.accepted(request, epoch, "", "", clock.monotonic_s()))
        self._book.forget(request)

    # ---- viewers ------------------------------------------------------------------------------------------------

    def join(self, viewer: str, mailbox: Mailbox, may_control: bool = True) -> None:
        """Send messages to `viewer` from now on. Mutates: self."""
        self._audience.join(viewer, mailbox, may_control)
        role = "controller" if may_control else "viewer"
        mailbox({"type": "hello", "protocol": 1, "viewer": viewer, "role": role, "state": self.state(may_control)})

    def leave(self, viewer: str) -> None:
        """Send `viewer` nothing any more. Mutates: self."""
        self._audience.leave(viewer)

    def say(self, message: dict[str, Any], to_viewers: dict[str, Any] | None = None) -> None:
        """A message to everybody who watches; `to_viewers` instead to those who may not steer."""
        self._audience.broadcast(message, to_viewers)

    def _tell_state(self) -> None:
        self._audience.broadcast(self.state(may_control=True), self.state(may_control=False))

    # ---- what there is to see -----------------------------------------------------------------------------------

    def picture(self) -> Any:
        """The picture on show, uint8 as in `streamdiff.video.pixel_format`, or None before the first."""
        return self._pacer.picture()

    def stalled_s(self) -> float:
        """Seconds since the engine made a frame, while it should; 0 when it need not."""
        progress = self._pacer.progress()
        if self.paused or progress.buffered:
            return 0.0
        return clock.monotonic_s() - self._last_made_s

    def stats(self) -> dict[str, Any]:
        """Live figures, JSON-able; None where nothing was measured yet."""
        dropped = sum(counters.dropped for counters in self.fanout.counters().values())
        figures = self._meter.figures(self._pacer.progress(), dropped, clock.monotonic_s())
        occupancy = [round(share, 3) for share in self._occupancy()]
        return figures | {"stalled": self.stalled_s() > 2.0, "occupancy": occupancy}

    def measure(self) -> None:
        """Bring what is not counted where it happens into the metrics."""
        self._meter.look(self._pacer.progress(), unanswered=self._book.unanswered, encoding=self.fanout.waiting)

    def state(self, may_control: bool) -> dict[str, Any]:
        """Everything a page needs to draw itself, JSON-able; for somebody who may steer, or may not."""
        return {
            "type": "state",
            "session": self.session,
            "prompt": self.prompt,
            "text": self.text,
            "notice": self.notice,
            "seed": self.seed,
            "paused": self.paused,
            "rev": self.rev,
            "engine": self.engine,
            "engine_reason": reason_for(self.engine_reason, may_control),
            "steps": self.steps,
            "steps_known": list(self._steps_known),
            "kv_context": self.kv_context,
            "switches": list(self.switches),
            "fps": self.fps,
            "native_fps": self._native_fps,
            "width": self.format.width,
            "height": self.format.height,
            "scale": self.format.scale,
            "bitrate": self.format.bitrate_bps,
            "codecs": list(self.fanout.codecs),
        }

    async def close(self) -> None:
        """End the threads and tasks of this view. The engine's session is not closed."""
        self.closed = True
        self._audience.disappoint(lambda: SessionEnded("the session ended before this was answered"))
        await self._back_pressure.close()
        self.fanout.stop()
        self._pacer.stop()
        self._meter.end()
