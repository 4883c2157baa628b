"""What is told of a device is the device's own time, and a device that does not get on is noticed, named, and left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.errors import EngineFailure
from streamdiff.pipeline.decode.decode_worker import Decoding
from streamdiff.pipeline.device_timer import BusyTime, DeviceTimer, HostEvent
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.device import Device
from tests.small import CPU, RED, small_model

MODEL = small_model(4)
CHUNK = MODEL.spec.chunk_frames


def test_the_time_is_the_device_s_and_the_host_never_waits_for_it() -> None:
    device = Device()
    timer = DeviceTimer(device.event)
    stream = timer.stream()
    for seconds in (10.0, 20.0):
        with stream.work("a chunk"):
            device.compute(seconds)
        device.compute(5.0)  # between works: waiting for a message
    assert timer.busy_s == 0.0, "nothing is done yet"
    device.carry_out(3)
    assert timer.busy_s == pytest.approx(10.0)
    device.carry_out()
    assert timer.busy_s == pytest.approx(30.0)
    device.wait(100.0)
    assert timer.busy_s == pytest.approx(30.0), "an idle device"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=16))
def test_busy_time_is_what_the_intervals_cover(given: list[tuple[int, int]]) -> None:
    intervals = sorted(((begin, begin + length) for begin, length in given), key=lambda each: each[1])
    busy = BusyTime()
    for begin, end in intervals:
        before_s = busy.total_s
        busy.add(begin, end)
        assert busy.total_s >= before_s
    assert busy.total_s == len({second for begin, end in intervals for second in range(begin, end)})


def test_a_work_that_is_never_done_is_named() -> None:
    device = Device()
    timer = DeviceTimer(device.event)
    stream = timer.stream()
    for chunk in range(2):
        with stream.work(f"chunk {chunk}"):
            device.compute(1.0)
    device.carry_out(1)
    assert timer.stuck(100.0, 6.0) is None, "begun just now, as far as is known"
    assert timer.stuck(105.0, 6.0) is None
    device.carry_out(3)  # the first is done, the second has begun
    assert timer.stuck(107.0, 6.0) is None and timer.stuck(112.0, 6.0) is None and not timer.hung
    assert timer.stuck(113.0, 6.0) == "its device is at chunk 1 for 6 s" and timer.hung
    device.carry_out()
    assert timer.stuck(120.0, 6.0) is None


def test_a_work_that_waits_for_another_rank_is_told_only_after_that_rank_had_time_to_say_so() -> None:
    device = Device()
    timer = DeviceTimer(device.event)
    with timer.stream().work("chunk 0"):
        device.compute(1.0)
    assert timer.stuck(0.0, 6.0) is None and timer.stuck(11.0, 6.0) is None
    assert timer.stuck(12.0, 6.0) == "its device waits to begin chunk 0 for 12 s"


class SlowDeviceEvent(HostEvent):
    """Of a device that needs a second from each event to the next, whatever the host's clock says."""

    _numbers = count()

    def record(self) -> None:
        self._at_s = float(next(self._numbers))


def test_one_figure_the_device_s_is_what_metrics_show_and_capacity_counts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is 4 steps and a clean pass, each of which is input, forward and sampling, and decoding: 15 works and
    some, a second each, that the host hands over in no time."""
    monkeypatch.setattr(DeviceTimer, "on", lambda device: DeviceTimer(SlowDeviceEvent))
    runtime = StreamingPipeline(MODEL, CPU)
    runtime.open(0, runtime.text.encode(RED), seed=1, epoch=0, steps=4, kv_context="clean")
    chunks = 0
    while chunks < 3:
        runtime.set_frame_credit(0, CHUNK)
        chunks += sum(frames.last for frames in runtime.step(0.1))
    runtime.close()
    work_s, (busy_s,) = runtime.figures.chunk_compute_s(), runtime.figures.busy_s()
    assert work_s is not None and work_s == pytest.approx(15 + MODEL.spec.chunk_latents, abs=7)
    assert busy_s == pytest.approx(3 * work_s, abs=12)


class StuckEvent(HostEvent):
    """The device came to the first works, and comes to no event any more."""

    _left = 31

    def record(self) -> None:
        super().record()
        StuckEvent._left -= 1
        self._passed = StuckEvent._left >= 0

    def query(self) -> bool:
        return self._passed


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamingPipeline]:
    StuckEvent._left = 31  # the last one of them begins a work
    monkeypatch.setattr(DeviceTimer, "on", lambda device: DeviceTimer(StuckEvent))
    runtime = StreamingPipeline(MODEL, CPU, watchdog_s=0.01)
    yield runtime
    runtime.close()


def test_the_only_rank_says_that_its_device_is_stuck(stuck: StreamingPipeline) -> None:
    stuck.open(0, stuck.text.encode(RED), seed=1, epoch=0, steps=4, kv_context="clean")
    stuck.set_frame_credit(0, 10**6)
    told = r"rank 0 hangs: its device (is at|waits to begin) (session 0, chunk \d|decoding chunk \d).*in the ring: "
    with pytest.raises(EngineFailure, match=told):
        for _ in range(100_000):
            stuck.step(0.01)


def test_nobody_waits_for_the_decoder_of_a_device_that_is_stuck() -> None:
    decoder, reached, let_go = MODEL.decoder, threading.Event(), threading.Event()
    assert decoder is not None

    class Stuck:
        temporal = decoder.temporal

        def new_memory(self) -> None:
            return None

        def decode(self, latents: object, memory: object) -> None:
            reached.set()
            let_go.wait()
            raise TypeError("this test is over")

    woken = threading.Event()
    decoding = Decoding.here(Stuck(), lambda piece: None, woken.set)  # type: ignore[arg-type]
    decoding.submit(0, 0, torch.zeros(MODEL.spec.chunk_shape))
    reached.wait()
    decoding.close(abandon=True)
    assert not woken.is_set(), "it still waits for its device"
    let_go.set()
    woken.wait()
