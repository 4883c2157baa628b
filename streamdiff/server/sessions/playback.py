"""The media side of one session: frames from the engine to the encoders at an even rate, and
reports of what was shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import FrameBatch, Ready
from streamdiff.errors import EngineFailure
from streamdiff.server.media.codecs import H264_CHOICES, Format
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.media.pacer import Pacer
from streamdiff.server.media.playout import PlayoutSlot
from streamdiff.server.media.snapshot import Snapshot
from streamdiff.server.metrics import Metrics


class Playback:
    """Pacer, encoders and snapshot of a session. Lives on the event loop.

    Back-pressure: it reports how many frames were shown or skipped, and the engine makes only so many beyond those.
    """

    def __init__(
        self,
        session: str,
        fps: float,
        config: Config,
        ready: Ready,
        metrics: Metrics,
        on_shown: Callable[[int, int, int], None],
        report: Callable[[int], Awaitable[None]],
    ) -> None:
        """`on_shown` is called with number, epoch and presentation time of every new frame on show; `report` sends the
        count of frames that were shown or skipped so far to the engine: when there is news, the latest count only."""
        self._on_shown, self._report = on_shown, report
        self._max_ahead_s = config.playback.lead_s
        h264 = H264_CHOICES[config.serve.encoder][-1]
        self.format = Format(ready.width, ready.height, fps, config.scale, config.serve.bitrate, h264)
        start_frames = min(ready.chunk_frames, self.max_ahead_frames(fps))
        loop = asyncio.get_running_loop()

        def deliver(slot: PlayoutSlot) -> None:  # on the pacer's thread
            loop.call_soon_threadsafe(self._shown, slot)

        self.pacer = Pacer(fps, start_frames, deliver, config.serve.grace_s)
        self.fanout = Fanout(self.format, self.pacer, metrics)
        self.snapshot = Snapshot(self.pacer.picture)
        self._made_s = clock.monotonic_s()
        self.made_frames = 0
        self._begun_frames = 0  # made, and shown or lost, before this playback
        self._progressed = asyncio.Event()
        self._reporting = asyncio.create_task(self._report_progress(), name=f"shown-{session}")

    def max_ahead_frames(self, fps: float) -> int:
        """Frames that the engine may make beyond those shown, at this rate."""
        return max(1, round(self._max_ahead_s * fps))

    def push(self, batch: FrameBatch, now_s: float) -> None:
        """Take frames that the engine made. Mutates: self."""
        self.pacer.push(batch.first, batch.pictures, batch.epoch)
        self._made_s, self.made_frames = now_s, batch.first + len(batch.pictures)

    @property
    def passed_frames(self) -> int:
        """Frames shown or skipped so far."""
        return max(self.pacer.progress().passed, self._begun_frames)

    def go_on(self, made_frames: int) -> None:
        """Begin with frame number `made_frames`, of a stream that another playback has shown before. Mutates: self."""
        self.made_frames = self._begun_frames = made_frames

    def clear_before(self, epoch: int) -> None:
        """Skip waiting frames of older epochs. Mutates: self."""
        self.pacer.clear_before(epoch)
        self._progressed.set()

    def set_fps(self, fps: float) -> None:
        """Show frames at another rate from now on. Mutates: self."""
        self.format = replace(self.format, fps=fps)
        self.pacer.set_fps(fps)
        self.fanout.set_format(self.format)

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
        self._progressed.set()

    async def _report_progress(self) -> None:
        reported = 0
        while True:
            await self._progressed.wait()
            self._progressed.clear()
            passed = self.pacer.progress().passed
            if passed > reported:
                reported = passed
                try:
                    await self._report(passed)
                except EngineFailure:
                    continue  # the reader of the engine's events reports it; `Open` carries it to the next engine
