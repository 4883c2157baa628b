"""The fan-out: what becomes of the encoders where the format changes, and where they fail."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import av
import pytest

from streamdiff import clock
from streamdiff.server.media import encoder
from streamdiff.server.media.codecs import Codec, Format
from streamdiff.server.media.encoder import EncodedFrame
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.media.pacer import Pacer
from streamdiff.server.metrics import Metrics
from tests.server.media.test_pacer import _pictures

FORMAT = Format(32, 32, 200.0)


class _Viewer:
    """Counts its packets."""

    def __init__(self) -> None:
        self.keys: list[bool] = []
        self.arrived = asyncio.Event()

    def put(self, encoded: EncodedFrame) -> None:
        self.keys.append(encoded.key)
        self.arrived.set()

    def line_bps(self, now_s: float) -> int | None:
        return None

    async def packet(self) -> bool:
        """Whether the next packet is a key frame."""
        self.arrived.clear()
        async with asyncio.timeout(20):
            await self.arrived.wait()
        return self.keys[-1]


def test_a_changed_format_needs_no_time_of_the_event_loop_and_the_present_one_is_no_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    rates: list[float] = []
    open_context = encoder.open_context

    def opened(codec: Codec, fmt: Format) -> av.VideoCodecContext:
        threads.append(threading.current_thread())
        rates.append(fmt.fps)
        return open_context(codec, fmt)

    monkeypatch.setattr(encoder, "open_context", opened)

    async def scene() -> None:
        pacer = Pacer(FORMAT.fps, 4, lambda slot: None)
        fanout, viewer = Fanout(FORMAT, pacer, Metrics(), lambda: None), _Viewer()
        pacer.push(0, _pictures(4), 0)
        fanout.attach("h264", viewer)
        assert await viewer.packet()
        for _ in range(10):
            fanout.set_format(replace(FORMAT))
        assert not await viewer.packet()
        assert rates == [200.0]
        for fps in (100.0, 50.0, 25.0):
            fanout.set_format(replace(FORMAT, fps=fps))
        while rates[-1] != 25.0:
            await viewer.packet()
        fanout.stop()
        pacer.stop()
        assert len(rates) <= 3, "at once for one of them, a little later for the last"
        assert threading.main_thread() not in threads

    asyncio.run(scene())


def test_an_encoder_that_cannot_be_opened_is_known_by_how_long_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        def fails(codec: Codec, fmt: Format) -> av.VideoCodecContext:
            raise av.FFmpegError(12, "Cannot allocate memory")

        monkeypatch.setattr(encoder, "open_context", fails)
        pacer = Pacer(FORMAT.fps, 4, lambda slot: None)
        fanout = Fanout(FORMAT, pacer, Metrics(), lambda: None)
        assert fanout.failing_s("h264", clock.monotonic_s()) == 0.0, "nobody watches"
        fanout.attach("h264", _Viewer())
        fanout._streams["h264"].encoder.stop()  # waits for the thread
        assert fanout.failing_s("h264", clock.monotonic_s() + 1.0) >= 1.0
        fanout.stop()
        pacer.stop()

    asyncio.run(scene())
