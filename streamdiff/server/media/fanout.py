"""Fan-out of encoded packets: one encoder per codec in use, started for its first receiver and stopped with its last.
Its bit rate follows the receivers' bandwidth estimates.

Knows nothing about peer connections or sessions. Lives on the event loop; packets come from encoder threads.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from streamdiff import clock
from streamdiff.server.media.codecs import Codec, Format
from streamdiff.server.media.encoder import EncodedFrame, EncoderThread
from streamdiff.server.media.pacer import Pacer
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.peers import Rate

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


class PacketReceiver(Protocol):
    """Takes the packets: a viewer's track, or an output."""

    def put(self, encoded: EncodedFrame) -> None:
        """Take one packet, at once; called on the event loop."""

    def line_bps(self, now_s: float) -> int | None:
        """Its bandwidth estimate in bit/s; None where there is none."""


class _Stream:
    """The encoder of one codec, the receivers of its packets, and counts of what was sent."""

    def __init__(self, encoder: EncoderThread, fmt: Format) -> None:
        self.receivers: set[PacketReceiver] = set()
        self.bits = Rate()
        self.encoder, self.dropped = encoder, CounterDelta()
        self.bitrate = BitrateController(fmt.bitrate_bps)


class Fanout:
    """Hands every packet of a codec to each receiver of that codec: encoded once, however many there are."""

    def __init__(self, fmt: Format, pacer: Pacer, metrics: Metrics, on_change: Callable[[], None]) -> None:
        """`on_change` is called when encoders begin or end."""
        self._on_change = on_change
        self._format, self._pacer, self._metrics = fmt, pacer, metrics
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Codec, _Stream] = {}
        self._adapted_s = 0.0

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

    def attach(self, codec: Codec, receiver: PacketReceiver) -> None:
        """Send `receiver` the stream, beginning with a key frame. Mutates: self."""
        if codec in self._streams:
            self._streams[codec].receivers.add(receiver)
            self.request_key(codec)
            return
        take = self._loop.call_soon_threadsafe
        encoder = EncoderThread(codec, self._format, lambda encoded: take(self._distribute, codec, encoded))
        self._streams[codec] = _Stream(encoder, self._format)
        self._streams[codec].receivers.add(receiver)
        self._set_encoders()

    def detach(self, codec: Codec, receiver: PacketReceiver) -> None:
        """Forget `receiver`. Mutates: self."""
        stream = self._streams.get(codec)
        if stream is None:
            return
        stream.receivers.discard(receiver)
        if not stream.receivers:
            del self._streams[codec]
            self._set_encoders()
            stream.encoder.stop()

    def set_format(self, fmt: Format) -> None:
        """Encode in another format soon, from a key frame on. Mutates: self."""
        self._format = fmt
        for stream in self._streams.values():
            stream.encoder.set_format(fmt)
            stream.bitrate = BitrateController(fmt.bitrate_bps)

    def _set_encoders(self) -> None:
        self._pacer.set_encoders(tuple(stream.encoder for stream in self._streams.values()))
        self._on_change()

    def request_key(self, codec: Codec) -> None:
        """A receiver of `codec` can go on only from a key frame."""
        if codec in self._streams:
            self._streams[codec].encoder.request_key()
            self._pacer.wake()

    def failing_s(self, codec: Codec, now_s: float) -> float:
        """Seconds since the encoder of `codec` has failed to make anything; 0 while it works."""
        since_s = self._streams[codec].encoder.failing_since_s if codec in self._streams else None
        return 0.0 if since_s is None else now_s - since_s

    def sent_bps(self, codec: Codec) -> float:
        """Bit/s that each receiver of `codec` is sent."""
        return self._streams[codec].bits.per_s(clock.monotonic_s()) if codec in self._streams else 0.0

    def stop(self) -> None:
        """End every encoder. Mutates: self."""
        self._pacer.set_encoders(())
        for stream in self._streams.values():
            stream.encoder.stop()
        self._streams.clear()

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
            receiver.put(encoded)
        if now_s - self._adapted_s >= ADAPT_INTERVAL_S:
            self._adapted_s = now_s
            self._adapt_bitrates(now_s)

    def _adapt_bitrates(self, now_s: float) -> None:
        """Adapt each encoder's bit rate to the receivers' bandwidth estimates. Mutates: self."""
        for codec, stream in self._streams.items():
            estimates = [bps for each in stream.receivers if (bps := each.line_bps(now_s)) is not None]
            rate_bps = stream.bitrate.decide(estimates, stream.bits.per_s(now_s), now_s)
            if rate_bps is not None:
                stream.encoder.set_bitrate(rate_bps)
            self._metrics.bitrate.labels(codec).set(stream.bitrate.rate_bps)
