"""The media side of one session: frames from the engine to the encoders at an even rate, and progress reports."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import Command, FrameBatch, Ready, SetMaxAhead, Shown
from streamdiff.errors import EngineFailure
from streamdiff.server.media.codecs import Format, openable
from streamdiff.server.media.encoder import as_rgb
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.media.pacer import Pacer
from streamdiff.server.media.playout import PlayoutLead, PlayoutSlot
from streamdiff.server.metrics import Metrics

QUALITY = 92
SKIP_EVERY_S = 0.5
"""Least seconds between two skips of frames for a new prompt. Without it, a viewer who sends prompts continuously would
see only first chunks, and take engine time from others."""


def _encode_jpeg(picture: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(as_rgb(picture)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


class Playback:
    """Pacer, encoders and snapshot of a session. Lives on the event loop.

    Back-pressure: it reports how many frames were shown or skipped, and the engine makes only so many beyond those as
    the lead says.
    """

    def __init__(
        self,
        session: str,
        fps: float,
        config: Config,
        ready: Ready,
        metrics: Metrics,
        on_shown: Callable[[int, int, int], None],
        send: Callable[[Command], Awaitable[None]],
        on_watched: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_shown` is called with number, epoch and presentation time of every new frame on show; `send` gives the
        engine the count of frames that were shown or skipped so far, and how many it may make beyond: when there is
        news, the latest only; `on_watched` is called when the first viewer has come or the last has gone, and may be
        at other times."""
        self._session, self._on_shown, self._send, self._on_watched = session, on_shown, send, on_watched
        self._chunk_frames, self._most_ahead_s = ready.chunk_frames, config.playback.max_ahead_s
        self.lead = PlayoutLead(ready.chunk_frames / fps, self._most_ahead_s)
        self.fps = fps
        """Frames shown per second; under load fewer than `format` says."""
        h264 = openable(config.serve.codec).get("h264", "libx264")
        self.format = Format(ready.width, ready.height, fps, config.serve.upscale, config.serve.bitrate, h264)
        take = asyncio.get_running_loop().call_soon_threadsafe
        self.pacer = Pacer(fps, ready.chunk_frames, lambda slot: take(self._shown, slot), config.serve.pause_after_s)
        self.progressed = asyncio.Event()
        """Wakes the progress report."""
        self.fanout = Fanout(self.format, self.pacer, metrics, self.progressed.set)
        self._jpeg: asyncio.Task[bytes] | None = None
        self._jpeg_of: weakref.ref[NDArray[np.uint8]] | None = None  # weak: a frame keeps the memory of its whole chunk
        self._made_s = clock.monotonic_s()
        self.made_frames = 0
        self._chunk, self._dry = (-1, -1), 0
        self._skip_s, self._skipped = -math.inf, False
        self._sent_ahead = self.ahead_frames
        self._begun_frames = 0  # made, and shown or lost, before this playback
        self._reporting = asyncio.create_task(self._report_progress(), name=f"shown-{session}")

    @property
    def ahead_frames(self) -> int:
        """Frames that the engine may make beyond those shown."""
        return max(1, round(self.lead.lead_s * self.fps))

    def push(self, batch: FrameBatch, now_s: float) -> None:
        """Take frames that the engine made. Mutates: self."""
        self.pacer.push(batch.first, batch.pictures, batch.epoch)
        self._made_s, self.made_frames = now_s, batch.first + len(batch.pictures)

    @property
    def passed_frames(self) -> int:
        """Frames shown or skipped so far."""
        return max(self.pacer.progress().passed, self._begun_frames)

    def resume_at(self, made_frames: int) -> None:
        """Resume a stream of an earlier playback at frame number `made_frames`. Mutates: self."""
        self.made_frames = self._begun_frames = made_frames

    async def jpeg(self) -> bytes | None:
        """The frame on show as a JPEG file, encoded once, however many ask for it; None before the first frame.
        Mutates: self."""
        if (picture := self.pacer.picture()) is None:
            return None
        if self._jpeg is None or self._jpeg_of is None or self._jpeg_of() is not picture:
            self._jpeg_of = weakref.ref(picture)
            self._jpeg = asyncio.create_task(asyncio.to_thread(_encode_jpeg, picture), name="jpeg")
        return await asyncio.shield(self._jpeg)  # one caller that leaves does not take it from the others

    def may_skip(self) -> bool:
        """Whether frames may be skipped for a prompt that comes now: not while the media clock is held, nor within
        `SKIP_EVERY_S` of the last skip. Mutates: self."""
        now_s = clock.monotonic_s()
        if self.pacer.held or now_s < self._skip_s + SKIP_EVERY_S:
            return False
        self._skip_s = now_s
        return True

    def clear_before(self, epoch: int, reset: bool = True) -> None:
        """Skip waiting frames of older epochs, at a `reset` or for a prompt. Mutates: self."""
        self._skipped = True
        self.pacer.clear_before(epoch, reset)
        self.progressed.set()

    def slack_s(self, batch: FrameBatch) -> float | None:
        """Seconds of video buffered when a chunk's first frames come, before they are pushed, plus what the lead may
        still grow by; if the buffer ran dry, minus the seconds for which the last picture stood. None for a chunk's
        further frames, for a stream's first two chunks, for one behind skipped frames, and while nothing is shown.

        Mutates: self.
        """
        chunk, before = (batch.epoch, batch.chunk), self._chunk
        if chunk == before:
            return None
        progress = self.pacer.progress()
        dry, self._dry, self._chunk = progress.dry - self._dry, progress.dry, chunk
        skipped, self._skipped = self._skipped, False
        if batch.chunk < 2 or skipped or self.pacer.held:
            return None
        slack_s, spare_s = -dry / self.fps if dry else progress.buffered / self.fps, self.lead.spare_s
        self.lead.arrived(slack_s)
        self.progressed.set()
        return slack_s + spare_s if slack_s > 0 else slack_s

    def set_fps(self, fps: float) -> None:
        """Show frames at another rate from now on, and encode for it; nothing for the present one. Mutates: self."""
        if fps == self.format.fps:
            return
        self.format = replace(self.format, fps=fps)
        self.show_fps(fps)
        self.fanout.set_format(self.format)

    def show_fps(self, fps: float) -> None:
        """Show frames at another rate from now on, with the present encoders. The lead is measured from the start, and
        the caller sends the new `ahead_frames`; the present rate changes nothing. Mutates: self."""
        if fps == self.fps:
            return
        self.fps, self.lead = fps, PlayoutLead(self._chunk_frames / fps, self._most_ahead_s)
        self._sent_ahead = self.ahead_frames
        self.pacer.set_fps(fps)

    def stalled_s(self) -> float:
        """Seconds since the engine made a frame; 0 while frames wait to be shown."""
        return 0.0 if self.pacer.progress().buffered else clock.monotonic_s() - self._made_s

    async def close(self) -> None:
        """End the threads and tasks."""
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)
        self.fanout.stop()
        self.pacer.stop()

    def _shown(self, slot: PlayoutSlot) -> None:
        self._on_shown(slot.frame, slot.epoch, slot.pts)
        self.progressed.set()

    async def _report_progress(self) -> None:
        reported = 0
        while True:
            await self.progressed.wait()
            self.progressed.clear()
            passed, ahead = self.pacer.progress().passed, self.ahead_frames
            try:
                await self._on_watched()
                if ahead != self._sent_ahead:
                    self._sent_ahead = ahead
                    await self._send(SetMaxAhead(self._session, ahead))
                if passed > reported:
                    reported = passed
                    await self._send(Shown(self._session, passed))
            except EngineFailure:
                continue  # the reader of the engine's events reports it; `Open` carries both to the next engine
