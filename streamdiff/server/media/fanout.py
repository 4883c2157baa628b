"""One encoder per codec in use, and the viewers of each: starts an encoder for its first viewer, ends it with its last.

Knows nothing about peer connections or sessions. Lives on the event loop; packets come from encoder threads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from typing import Protocol

from streamdiff import clock
from streamdiff.server.media.bitrate import BitrateController
from streamdiff.server.media.codecs import Codec, Format
from streamdiff.server.media.encoder import EncoderCounters, EncoderThread
from streamdiff.server.media.pacer import Pacer
from streamdiff.server.media.packets import EncodedFrame
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.rate_limit import Rate

LOOK_S = 1.0
"""How often the viewers' lines are looked at."""


class Receiver(Protocol):
    """Who gets the packets: a viewer's track, or an output."""

    def put(self, encoded: EncodedFrame) -> None:
        """Take one packet, at once; called on the event loop."""

    def line_bps(self, now_s: float) -> int | None:
        """Bit/s that its line carries, where it says so."""


class Fanout:
    """Hands every packet of a codec to each viewer of that codec: encoded once, however many watch."""

    def __init__(self, fmt: Format, pacer: Pacer, metrics: Metrics) -> None:
        self._format = fmt
        self._pacer = pacer
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._encoders: dict[Codec, EncoderThread] = {}
        self._viewers: dict[Codec, set[Receiver]] = {}
        self._governors: dict[Codec, BitrateController] = {}
        self._dropped: dict[Codec, CounterDelta] = {}
        self._look_s = 0.0
        self._bits: defaultdict[Codec, Rate] = defaultdict(Rate)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs that are encoded right now."""
        return tuple(self._encoders)

    def attach(self, codec: Codec, track: Receiver) -> None:
        """Send `track` the stream, beginning with a key frame. Mutates: self."""
        self._viewers.setdefault(codec, set()).add(track)
        if codec in self._encoders:
            self.request_key(codec)
            return
        self._encoders[codec] = self._new_encoder(codec, self._format)
        self._governors[codec] = BitrateController(self._format.bitrate_bps)
        self._pacer.set_encoders(tuple(self._encoders.values()))

    def detach(self, codec: Codec, track: Receiver) -> None:
        """Forget `track`. Mutates: self."""
        viewers = self._viewers.get(codec, set())
        viewers.discard(track)
        if viewers or codec not in self._encoders:
            return
        encoder = self._encoders.pop(codec)
        self._pacer.set_encoders(tuple(self._encoders.values()))
        encoder.stop()

    def set_format(self, fmt: Format) -> None:
        """Encode in another format from now on: new encoders, which begin with a key frame. Mutates: self."""
        self._format = fmt
        old = tuple(self._encoders.values())
        self._encoders = {codec: self._new_encoder(codec, fmt) for codec in self._encoders}
        self._pacer.set_encoders(tuple(self._encoders.values()))
        self._governors = {codec: BitrateController(fmt.bitrate_bps) for codec in self._encoders}
        for encoder in old:
            encoder.stop()

    def _new_encoder(self, codec: Codec, fmt: Format) -> EncoderThread:
        self._dropped[codec] = CounterDelta()
        return EncoderThread(codec, fmt, partial(self._deliver, codec))

    def request_key(self, codec: Codec) -> None:
        """A viewer of `codec` can go on only from a key frame."""
        encoder = self._encoders.get(codec)
        if encoder is not None:
            encoder.request_key()
            self._pacer.wake()

    def counters(self) -> dict[Codec, EncoderCounters]:
        """What each running encoder has done."""
        return {codec: encoder.counters for codec, encoder in self._encoders.items()}

    @property
    def waiting(self) -> int:
        """Pictures that wait to be encoded."""
        return sum(encoder.waiting for encoder in self._encoders.values())

    def stop(self) -> None:
        """End every encoder. Mutates: self."""
        self._pacer.set_encoders(())
        for encoder in self._encoders.values():
            encoder.stop()
        self._encoders.clear()
        self._viewers.clear()

    def _deliver(self, codec: Codec, encoded: EncodedFrame) -> None:
        """On the encoder's thread."""
        self._loop.call_soon_threadsafe(self._fan, codec, encoded)

    def sent_bps(self, codec: Codec) -> float:
        """Bit/s that each viewer of `codec` is sent."""
        return self._bits[codec].per_s(clock.monotonic_s())

    def _fan(self, codec: Codec, encoded: EncodedFrame) -> None:
        self._bits[codec].add(8 * encoded.packet.size, clock.monotonic_s())
        self._metrics.encoded_bytes.labels(codec).inc(encoded.packet.size)
        self._metrics.encode_s.labels(codec).observe(encoded.encode_s)
        if encoded.key:
            self._metrics.key_frames.labels(codec).inc()
        if (encoder := self._encoders.get(codec)) is not None:
            self._metrics.encoder_dropped.labels(codec).inc(self._dropped[codec].more(encoder.counters.dropped))
        for track in self._viewers.get(codec, set()):
            track.put(encoded)
        now_s = clock.monotonic_s()
        if now_s - self._look_s >= LOOK_S:
            self._look_s = now_s
            self._govern(now_s)

    def _govern(self, now_s: float) -> None:
        """Let each encoder's rate follow what the viewers' lines carry. Mutates: self."""
        for codec, encoder in self._encoders.items():
            lines = [bps for track in self._viewers[codec] if (bps := track.line_bps(now_s)) is not None]
            rate_bps = self._governors[codec].decide(lines, self.sent_bps(codec), now_s)
            if rate_bps is not None:
                encoder.set_bitrate(rate_bps)
            self._metrics.bitrate.labels(codec).set(self._governors[codec].rate_bps)
