"""The fan-out: what becomes of the encoders where the format changes, and where they fail; its bit rate."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff import clock
from streamdiff.server.media import encoder
from streamdiff.server.media.codecs import Codec, Format
from streamdiff.server.media.encoder import EncodedFrame
from streamdiff.server.media.fanout import FLOOR, SETTLE_S, BitrateController, Fanout
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


def test_it_falls_when_lines_carry_less_than_is_sent_and_comes_back() -> None:
    governor = BitrateController(4_000_000)
    assert governor.decide([2_000_000, 2_000_000, 9_000_000], 4_000_000, 0.0) == 1_700_000
    assert governor.decide([1_000_000] * 3, 1_700_000, 1.0) is None, "too soon"
    now_s, rates = 0.0, []
    while governor.rate_bps < 4_000_000:
        now_s += SETTLE_S
        rates.append(governor.decide([int(1.5 * governor.rate_bps)], governor.rate_bps, now_s))
    assert rates == sorted(r for r in rates if r is not None)
    assert len(rates) <= 5, "an estimate is bounded by 1.5 times what is received; that is enough to get back up"


@pytest.mark.parametrize(
    ("estimates_bps", "sent_bps"), [([300_000, 6_000_000, 6_000_000], 4_000_000), ([700_000], 450_000), ([], 4_000_000)]
)
def test_one_bad_line_of_many_a_simple_picture_and_no_estimates_change_nothing(
    estimates_bps: list[int], sent_bps: int
) -> None:
    assert BitrateController(4_000_000).decide(estimates_bps, sent_bps, 0.0) is None


@given(st.lists(st.tuples(st.integers(1, 20_000_000), st.integers(1, 20_000_000)), max_size=50))
def test_it_stays_between_floor_and_configured_rate(looks: list[tuple[int, int]]) -> None:
    governor = BitrateController(3_000_000)
    for second, (line_bps, sent_bps) in enumerate(looks):
        before = governor.rate_bps
        rate_bps = governor.decide([line_bps], sent_bps, float(second))
        assert FLOOR * 3_000_000 <= governor.rate_bps <= 3_000_000
        if rate_bps is not None and rate_bps < before:
            assert line_bps < sent_bps, "it falls only for a line that does not carry what is sent"
