"""What is told of a device is the device's own time, and a device that does not get on is noticed, named, and left.
What a chunk and its rows cost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.core import MicroStep
from streamdiff.errors import EngineFailure
from streamdiff.pipeline.build import row_costs
from streamdiff.pipeline.decode.decode_worker import Decoding
from streamdiff.pipeline.device_timer import BusyTime, DeviceTimer, HostEvent
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.runner.graphs import Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.pipeline.throughput import ChunkCostMeter
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


def test_time_with_nothing_to_do_costs_nothing() -> None:
    meter = ChunkCostMeter(0.0, [7.0])  # warming up
    assert meter.chunk_compute_s() is None
    meter.finished(0.5, [7.5], [1])  # half a second of work
    assert meter.chunk_compute_s() == pytest.approx(0.5)
    meter.finished(61.0, [8.5], [1, 1])  # a minute of waiting for viewers, then two sessions' chunks in a second
    assert meter.chunk_compute_s() == pytest.approx(0.5)


def test_chunks_in_other_numbers_of_steps_count_as_what_they_are() -> None:
    """Two passes a second: a chunk in 4 steps has five and takes 2.5 s, one in 2 steps three and takes 1.5 s."""
    usual, fewer = ChunkCostMeter(0.0, [0.0]), ChunkCostMeter(0.0, [0.0])
    for number in range(1, 8):
        usual.finished(number * 2.5, [number * 2.5], [1])
        fewer.finished(number * 1.5, [number * 1.5], [3 / 5])
    assert usual.chunk_compute_s() == pytest.approx(2.5) == fewer.chunk_compute_s()


@pytest.mark.parametrize("pace_s", [0.1, 1.0, 12.0], ids=["many chunks", "some", "one at a time"])
def test_a_busy_moment_is_forgotten(pace_s: float) -> None:
    """Chunks that took a second, and then, when the machine was left alone, chunks of a tenth."""
    meter = ChunkCostMeter(0.0, [0.0])
    for number in range(1, 11):
        meter.finished(number * 1.0, [number * 1.0], [1])
    assert meter.chunk_compute_s() == pytest.approx(1.0)
    for number in range(1, 600):
        meter.finished(10 + number * pace_s, [10 + number * 0.1], [1])
        if number * pace_s > 31 and number >= 5:
            break
    assert meter.chunk_compute_s() == pytest.approx(0.1, rel=0.2)


def test_in_a_ring_the_busiest_rank_decides() -> None:
    meter = ChunkCostMeter(0.0, [0.0, 0.0])
    meter.finished(1.0, [0.0, 0.0], [1])
    assert meter.chunk_compute_s() is None, "no rank has told yet that it worked"
    for number in range(2, 20):
        meter.finished(number * 1.0, [number * 0.1, number * 0.5], [1])
    assert meter.chunk_compute_s() == pytest.approx(0.5)


def test_what_rows_cost_is_measured_on_the_stage_itself_and_leaves_nothing_open() -> None:
    model = small_model(2)
    stage = ModelRunner(model, CPU)
    asked: list[int] = []
    forward = stage.forward

    def counting(rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        asked.append(len({row.session for row in rows}))
        return forward(rows, given)

    stage.forward = counting  # type: ignore[method-assign]
    costs = row_costs(stage, 6, steps=4, kv_context="clean", memory=RankMemory(10**12))
    assert len(costs) == 6 and costs == sorted(costs) and costs[0] > 0
    assert set(asked) == {1, 2, 4, 6} and not stage.sessions
    asked.clear()
    assert len(row_costs(stage, 6, steps=4, kv_context="same_step", memory=RankMemory(0))) == 6
    assert set(asked) == {1}, "there is room for no more"
