"""One session as its viewers see it: the engine's events in, pictures and receipts out, back-pressure in return.

Lives on the event loop. Knows nothing about HTTP, SDP or peer connections: a viewer is a track and a mailbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import (
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
    SetPrompt,
    Shown,
)
from streamdiff.engine.pacing import Due
from streamdiff.errors import EngineFailure
from streamdiff.serve.codecs import Format
from streamdiff.serve.control import Control, Receipt, RequestBook
from streamdiff.serve.fanout import Fanout
from streamdiff.serve.metrics import Metrics
from streamdiff.serve.pacer import Pacer
from streamdiff.serve.rate import Rate

Mailbox = Callable[[dict[str, Any]], None]


class SessionView:
    """Shows one session. `send` hands a command to the engine."""

    def __init__(
        self,
        session: str,
        config: Config,
        ready: Ready,
        fmt: Format,
        send: Callable[[Command], Awaitable[None]],
        metrics: Metrics,
    ) -> None:
        self.session = session
        self.prompt = config.session.prompt
        self.seed = config.session.seed
        self.text = ""
        self.notice = ""
        self.paused = False
        self.opened = False
        self._send = send
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._fps = config.playback.fps
        lead_frames = max(1, round(config.playback.lead_s * self._fps))
        self._pacer = Pacer(self._fps, min(ready.chunk_frames, lead_frames), self._shown_on_pacer)
        self.format = fmt
        self.fanout = Fanout(fmt, self._pacer, metrics)
        self._book = RequestBook()
        self._answers: dict[str, asyncio.Future[Receipt]] = {}
        self._mailboxes: dict[str, Mailbox] = {}
        self._made, self._shown = Rate(), Rate()
        self._chunk_s: float | None = None
        self._lag_s: float | None = None
        self._last_made_s = clock.monotonic_s()
        self._latest_shown: tuple[int, int] | None = None
        self._moved = asyncio.Event()
        self._reporting = asyncio.create_task(self._report_shown(), name=f"shown-{session}")

    async def open(self) -> None:
        """Ask the engine for the session."""
        await self._send(Open(self.session, self.prompt, self.seed))

    # ---- the engine's events ------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Take one of this session's events. Mutates: self."""
        now_s = clock.monotonic_s()
        match event:
            case FrameBatch():
                self._take_frames(event, now_s)
            case Opened():
                self.opened = True
                self.text, self.notice = event.text, event.notice
                self._broadcast(self.state())
            case Accepted():
                self._take_accepted(event, now_s)
            case Applied():
                self._tell(self._book.applied(event.epoch, event.first_frame, now_s))
            case Refused():
                self._tell(self._book.refused(event.request, event.field, event.reason, now_s))
            case Closed():
                self.opened = False
            case _:
                pass

    def _take_frames(self, batch: FrameBatch, now_s: float) -> None:
        count = len(batch.pictures)
        self._pacer.push(batch.first, batch.pictures, batch.epoch)
        self._last_made_s = now_s
        self._made.add(count, now_s)
        self._metrics.made.labels(self.session).inc(count)
        if batch.chunk_s is not None:
            self._chunk_s = batch.chunk_s
            self._metrics.chunk_s.labels(self.session).observe(batch.chunk_s)

    def _take_accepted(self, event: Accepted, now_s: float) -> None:
        control = self._book.find(event.request)
        if control is not None and control.kind == "reset":
            self._pacer.clear_before(event.epoch)
            self._moved.set()
            self.seed = self.seed if control.seed is None else control.seed
        elif control is not None:
            self.prompt = control.prompt
        self.text, self.notice = event.text or self.text, event.notice
        self._tell(self._book.accepted(event.request, event.epoch, event.text, event.notice, now_s))
        self._broadcast(self.state())

    # ---- what was shown -----------------------------------------------------------------------------------------

    def _shown_on_pacer(self, due: Due) -> None:
        self._loop.call_soon_threadsafe(self._take_shown, due.frame, due.epoch)

    def _take_shown(self, frame: int, epoch: int) -> None:
        now_s = clock.monotonic_s()
        self._latest_shown = (frame, epoch)
        self._shown.add(1, now_s)
        self._metrics.shown.labels(self.session).inc()
        self._tell(self._book.shown(frame, epoch, now_s))
        self._moved.set()

    async def _report_shown(self) -> None:
        """Tell the engine how far its viewers are, so that it makes no more than its lead; the latest count wins."""
        reported = 0
        while True:
            await self._moved.wait()
            self._moved.clear()
            passed = self._pacer.progress().passed
            if passed > reported:
                reported = passed
                try:
                    await self._send(Shown(self.session, passed))
                except EngineFailure:
                    return  # whoever reads the engine's events says so

    # ---- requests -----------------------------------------------------------------------------------------------

    async def control(self, control: Control, owner: str) -> str:
        """Carry out a valid message of `owner`; returns the request's name. Its receipts follow.

        Raises:
            EngineFailure: the engine has ended.
        """
        request = self._book.begin(control, owner, clock.monotonic_s())
        match control.kind:
            case "prompt":
                await self._send(SetPrompt(self.session, control.prompt, request))
            case "reset":
                await self._send(Reset(self.session, control.seed, request))
                if self.paused:
                    await self._set_paused(False)
            case "pause" | "resume":
                await self._set_paused(control.kind == "pause")
                self._done_at_once(request)
            case "get" | "ping":
                self._done_at_once(request)
        return request

    async def control_and_wait(self, control: Control, owner: str, timeout_s: float) -> Receipt:
        """Like `control`, and wait for the engine's answer: a receipt `accepted` or `refused`.

        Raises:
            TimeoutError: the engine did not answer in time; the request may still be carried out.
            EngineFailure: the engine has ended.
        """
        answer: asyncio.Future[Receipt] = self._loop.create_future()
        self._answers[owner] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self.control(control, owner)
                return await answer
        finally:
            del self._answers[owner]

    async def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._pacer.set_paused(paused)
        self._broadcast(self.state())
        await self._send(Pause(self.session) if paused else Resume(self.session))

    def _done_at_once(self, request: str) -> None:
        epoch = self._latest_shown[1] if self._latest_shown else 0
        self._tell(self._book.accepted(request, epoch, "", "", clock.monotonic_s()))
        self._book.forget(request)

    # ---- viewers ------------------------------------------------------------------------------------------------

    def join(self, viewer: str, mailbox: Mailbox) -> None:
        """Send messages to `viewer` from now on. Mutates: self."""
        self._mailboxes[viewer] = mailbox
        mailbox({"type": "hello", "protocol": 1, "viewer": viewer, "state": self.state()})

    def leave(self, viewer: str) -> None:
        """Send `viewer` nothing any more. Mutates: self."""
        self._mailboxes.pop(viewer, None)

    def say(self, message: dict[str, Any]) -> None:
        """A message to everybody who watches."""
        self._broadcast(message)

    def _tell(self, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            if receipt.stage == "shown":
                self._lag_s = receipt.lag_s
                self._metrics.request_lag_s.labels(receipt.kind).observe(receipt.lag_s)
            if receipt.stage in ("accepted", "refused") and receipt.kind in ("prompt", "reset"):
                self._metrics.controls.labels(receipt.kind, receipt.stage).inc()
            answer = self._answers.get(receipt.owner)
            if answer is not None and not answer.done() and receipt.stage in ("accepted", "refused"):
                answer.set_result(receipt)
            mailbox = self._mailboxes.get(receipt.owner)
            if mailbox is not None:
                mailbox(receipt.message())

    def _broadcast(self, message: dict[str, Any]) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox(message)

    # ---- what there is to see -----------------------------------------------------------------------------------

    def picture(self) -> Any:
        """The picture on show, uint8 `[H, W, 3]`, or None before the first."""
        return self._pacer.picture()

    def stalled_s(self) -> float:
        """Seconds since the engine made a frame, while it should; 0 when it need not."""
        progress = self._pacer.progress()
        if self.paused or progress.buffered:
            return 0.0
        return clock.monotonic_s() - self._last_made_s

    def stats(self) -> dict[str, Any]:
        """Live figures, JSON-able; None where nothing was measured yet."""
        now_s = clock.monotonic_s()
        progress = self._pacer.progress()
        self._metrics.repeated.labels(self.session).set(progress.repeated)
        self._metrics.dropped.labels(self.session).set(progress.dropped)
        self._metrics.buffered.labels(self.session).set(progress.buffered)
        encoders = self.fanout.counters()
        return {
            "type": "stats",
            "frame": progress.frame,
            "shown_fps": round(self._shown.per_s(now_s), 1),
            "made_fps": round(self._made.per_s(now_s), 1),
            "chunk_ms": None if self._chunk_s is None else round(self._chunk_s * 1000),
            "prompt_lag_ms": None if self._lag_s is None else round(self._lag_s * 1000),
            "buffered": progress.buffered,
            "repeated": progress.repeated,
            "dropped": progress.dropped,
            "missed": progress.missed,
            "encoder_dropped": sum(counters.dropped for counters in encoders.values()),
            "stalled": self.stalled_s() > 2.0,
        }

    def state(self) -> dict[str, Any]:
        """Everything a page needs to draw itself, JSON-able."""
        return {
            "type": "state",
            "session": self.session,
            "prompt": self.prompt,
            "text": self.text,
            "notice": self.notice,
            "seed": self.seed,
            "paused": self.paused,
            "fps": self._fps,
            "width": self.format.width,
            "height": self.format.height,
            "scale": self.format.scale,
            "bitrate": self.format.bitrate_bps,
            "codecs": list(self.fanout.codecs),
        }

    async def close(self) -> None:
        """End the threads and tasks of this view. The engine's session is not closed."""
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)
        self.fanout.stop()
        self._pacer.stop()
