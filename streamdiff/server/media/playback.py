"""The media side of one session: frames from the engine to the encoders at an even rate, packets from there to every
receiver, and progress reports.

One encoder per codec in use, started for its first receiver and stopped with its last; its bit rate follows the
receivers' bandwidth estimates. Knows nothing about peer connections. Lives on the event loop; packets come from encoder
threads.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from io import BytesIO

from PIL import Image

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import Command, FrameBatch, Ready, SetMaxAhead, Shown
from streamdiff.errors import EngineFailure
from streamdiff.server.media.clip import KeptFrame, RecentFrames
from streamdiff.server.media.encoder import Codec, EncodedFrame, EncoderThread, Format, Picture, as_rgb
from streamdiff.server.media.pacer import Pacer
from streamdiff.server.media.playout import PlayoutLead, PlayoutSlot
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.peers import Rate
from streamdiff.server.tasks import end_tasks

QUALITY = 92
SKIP_EVERY_S = 0.5
"""Least seconds between two skips of frames for a new prompt. Without it, a viewer who sends prompts continuously would
see only first chunks, and take engine time from others."""

FLOOR = 0.4
"""The rate never falls below this share of the configured one, which is also the highest."""
SETTLE_S = 4.0
"""Between changes: each begins with a key frame, and estimates need a while to follow."""
HEADROOM = 0.85
RISE = 1.25
CLEARLY_MORE = 1.2
SMALLEST = 0.05
"""Smaller changes, as a share of the configured rate, are not made."""
FRESH_S = 10.0
"""An older estimate (REMB) is ignored."""
TRIAL_S = 6.0
"""A viewer's first estimates grow from a guess, whatever its line can carry."""
ADAPT_INTERVAL_S = 1.0
"""Between decisions on the bit rate."""


def _encode_jpeg(picture: Picture) -> bytes:
    file = BytesIO()
    Image.fromarray(as_rgb(picture)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


class BitrateController:
    """The bit rate of one encoder. Sans-IO."""

    def __init__(self, configured_bps: int) -> None:
        self._highest = configured_bps
        self._changed_s = float("-inf")
        self.rate_bps = configured_bps

    def decide(self, estimates_bps: Sequence[int], sent_bps: float, now_s: float) -> int | None:
        """The new rate in bit/s, or None to leave it.

        An estimate is bounded by what a viewer receives, and a simple picture takes fewer bits than allowed: so what
        counts is whether the line carries what is *sent*. Mutates: self.
        """
        if not estimates_bps or now_s - self._changed_s < SETTLE_S:
            return None
        line_bps = statistics.median_low(estimates_bps)
        if line_bps < sent_bps:
            target = min(HEADROOM * line_bps, self.rate_bps)
        elif line_bps > CLEARLY_MORE * sent_bps:
            target = RISE * self.rate_bps
        else:
            return None
        rate_bps = int(min(max(target, FLOOR * self._highest), self._highest))
        if abs(rate_bps - self.rate_bps) < SMALLEST * self._highest:
            return None
        self._changed_s = now_s
        self.rate_bps = rate_bps
        return rate_bps


Receiver = Callable[[EncodedFrame], None]
"""Takes a packet, at once; called on the event loop."""


class _Stream:
    """The encoder of one codec, the receivers of its packets, the last of these, and counts of what was sent."""

    def __init__(self, encoder: EncoderThread, fmt: Format) -> None:
        self.receivers: dict[Receiver, Callable[[float], int | None]] = {}
        """Each with its bandwidth estimate in bit/s at a time, or None."""
        self.recent, self.bits = RecentFrames(), Rate()
        self.encoder, self.dropped = encoder, CounterDelta()
        self.bitrate = BitrateController(fmt.bitrate_bps)


class Playback:
    """Pacer, encoders and snapshot of a session. Every packet of a codec goes to each receiver of that codec: encoded
    once, however many there are.

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
        self.lead, self.steered = PlayoutLead(ready.chunk_frames / fps, self._most_ahead_s), False
        self.fps = fps
        """Frames shown per second; under load fewer than `format` says."""
        self.format = Format(ready.width, ready.height, fps, config.serve.upscale, config.serve.bitrate)
        self._call_soon = asyncio.get_running_loop().call_soon_threadsafe
        show, grace_s = self._shown, config.serve.pause_after_s
        self.pacer = Pacer(fps, ready.chunk_frames, lambda slot: self._call_soon(show, slot), grace_s)
        self.progressed = asyncio.Event()
        """Wakes the progress report."""
        self._metrics = metrics
        self._streams: dict[Codec, _Stream] = {}
        self._adapted_s = 0.0
        self._jpeg: asyncio.Task[bytes] | None = None
        self._jpeg_of: weakref.ref[Picture] | None = None  # weak: a frame keeps the memory of its whole chunk
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

    def last(self, seconds: float) -> tuple[Codec, list[KeptFrame]] | None:
        """What was shown in the last `seconds`, of the codec that has most of them; None where nobody watches."""
        if not (kept := {codec: stream.recent for codec, stream in self._streams.items() if stream.recent.kept_s}):
            return None
        codec = max(kept, key=lambda each: (min(kept[each].kept_s, seconds), each == "h264"))
        return codec, kept[codec].last(seconds)

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
        for stream in self._streams.values():
            stream.encoder.set_format(self.format)
            stream.bitrate = BitrateController(self.format.bitrate_bps)

    def show_fps(self, fps: float) -> None:
        """Show frames at another rate from now on, with the present encoders. The lead is measured from the start, and
        the caller sends the new `ahead_frames`; the present rate changes nothing. Mutates: self."""
        if fps == self.fps:
            return
        self.fps = fps
        self._begin_lead()
        self._sent_ahead = self.ahead_frames
        self.pacer.set_fps(fps)

    def steer(self) -> None:
        """Keep as little video waiting as the machine allows, from the first control on. Mutates: self."""
        if not self.steered:
            self.steered = True
            self._begin_lead()
            self.progressed.set()

    def _begin_lead(self) -> None:
        self.lead = PlayoutLead(self._chunk_frames / self.fps, self._most_ahead_s, self.steered)

    def stalled_s(self) -> float:
        """Seconds since the engine made a frame; 0 while frames wait to be shown."""
        return 0.0 if self.pacer.progress().buffered else clock.monotonic_s() - self._made_s

    async def close(self) -> None:
        """End the threads and tasks."""
        await end_tasks(self._reporting)
        self.pacer.stop()
        for stream in self._streams.values():
            stream.encoder.stop()
        self._streams.clear()

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

    # ---- receivers ----------------------------------------------------------------------------------------------

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs that are encoded right now."""
        return tuple(self._streams)

    @property
    def waiting(self) -> int:
        """Pictures that wait to be encoded."""
        return sum(stream.encoder.waiting for stream in self._streams.values())

    @property
    def dropped(self) -> int:
        """Pictures that the running encoders did not encode."""
        return sum(stream.encoder.dropped for stream in self._streams.values())

    def attach(
        self, codec: Codec, receiver: Receiver, line_bps: Callable[[float], int | None] = lambda now_s: None
    ) -> None:
        """Send `receiver` the stream, beginning with a key frame. `line_bps`: its bandwidth estimate. Mutates: self."""
        if codec in self._streams:
            self.request_key(codec)
        else:
            encoder = EncoderThread(codec, self.format, lambda each: self._call_soon(self._distribute, codec, each))
            self._streams[codec] = _Stream(encoder, self.format)
            self._set_encoders()
        self._streams[codec].receivers[receiver] = line_bps

    def detach(self, codec: Codec, receiver: Receiver) -> None:
        """Forget `receiver`. Mutates: self."""
        if (stream := self._streams.get(codec)) is None:
            return
        stream.receivers.pop(receiver, None)
        if not stream.receivers:
            del self._streams[codec]
            self._set_encoders()
            stream.encoder.stop()

    def _set_encoders(self) -> None:
        self.pacer.set_encoders(tuple(stream.encoder for stream in self._streams.values()))
        self.progressed.set()

    def request_key(self, codec: Codec) -> None:
        """A receiver of `codec` can continue only from a key frame."""
        if codec in self._streams:
            self._streams[codec].encoder.request_key()
            self.pacer.wake()

    def failing_s(self, codec: Codec, now_s: float) -> float:
        """Seconds since the encoder of `codec` has failed to make anything; 0 while it works."""
        since_s = self._streams[codec].encoder.failing_since_s if codec in self._streams else None
        return 0.0 if since_s is None else now_s - since_s

    def sent_bps(self, codec: Codec) -> float:
        """Bit/s that each receiver of `codec` is sent."""
        return self._streams[codec].bits.per_s(clock.monotonic_s()) if codec in self._streams else 0.0

    def _distribute(self, codec: Codec, encoded: EncodedFrame) -> None:
        now_s = clock.monotonic_s()
        self._metrics.encoded_bytes.labels(codec).inc(encoded.packet.size)
        self._metrics.encode_s.labels(codec).observe(encoded.encode_s)
        self._metrics.key_frames.labels(codec).inc(encoded.key)
        if (stream := self._streams.get(codec)) is None:
            return
        stream.bits.add(8 * encoded.packet.size, now_s)
        self._metrics.encoder_dropped.labels(codec).inc(stream.dropped.increase(stream.encoder.dropped))
        for receiver in stream.receivers:
            receiver(encoded)
        if stream.recent.put(encoded, held=self.pacer.held):
            self.request_key(codec)
        if now_s - self._adapted_s >= ADAPT_INTERVAL_S:
            self._adapted_s = now_s
            for codec, stream in self._streams.items():
                estimates = [bps for each in stream.receivers.values() if (bps := each(now_s)) is not None]
                rate_bps = stream.bitrate.decide(estimates, stream.bits.per_s(now_s), now_s)
                if rate_bps is not None:
                    stream.encoder.set_format(replace(self.format, bitrate=rate_bps))
                self._metrics.bitrate.labels(codec).set(stream.bitrate.rate_bps)
