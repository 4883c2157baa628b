"""Four stages over the NCCL link's own code, with hosts, devices and records of all speeds: who waits?

Time goes in rounds. In a round a host hands one work to its device. A forward takes a device some rounds, a record
comes to the next host at once or in the next round, and transfers end as soon as both ends are there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from streamdiff.core import MicroStep
from streamdiff.pipeline.distributed import nccl
from streamdiff.pipeline.distributed.message import MessageKind, MessageLayout, StageMessage
from streamdiff.pipeline.distributed.nccl import NcclReceiver, NcclSender
from streamdiff.pipeline.runner.model_runner import Worker
from tests.pipeline.distributed.fake_device import RUBBISH, Device, Wire, World
from tests.small import CPU

STAGES, WORKS = 4, 40
BARE = MessageLayout(1, (), None)
LIMIT_S = 240.0


class Host:
    """A thread that runs while nobody else does, until it pauses."""

    def __init__(self) -> None:
        self.go, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False

    def start(self, main: Callable[[], None]) -> None:
        def run() -> None:
            self.go.acquire()
            main()
            self.over = True
            self.paused.release()

        threading.Thread(target=run, daemon=True).start()

    def pause(self) -> None:
        """To the next round."""
        self.paused.release()
        self.go.acquire()

    def a_round(self) -> None:
        if not self.over:
            self.go.release()
            assert self.paused.acquire(timeout=LIMIT_S)


class Clock:
    now = 0


@dataclass
class Records:
    """Both ends of the records of an edge, whose reader is `host`."""

    host: Host
    clock: Clock
    rounds: int
    on_the_way: deque[tuple[int, StageMessage]] = field(default_factory=deque)
    ready: bool = True
    ended: bool = False

    def send(self, work: StageMessage) -> None:
        self.on_the_way.append((self.clock.now + self.rounds, work))

    def receive(self, wait_s: float | None) -> StageMessage | None:
        while not self.on_the_way or self.on_the_way[0][0] > self.clock.now:
            if wait_s == 0.0:
                return None
            self.host.pause()
        return self.on_the_way.popleft()[1].bare


@dataclass
class End:
    """As `NcclEnd`."""

    streams: Device
    start: Callable[[int], Any]
    layout: MessageLayout = BARE
    peer: int = 0
    tag: int = 0
    device: torch.device = CPU

    def slots(self, operation: object) -> tuple[list[torch.Tensor], Callable[[int], Any]]:
        return [torch.empty(0, dtype=torch.uint8)] * nccl.SLOTS, self.start


class Stage:
    """Hands forwards to a device; that takes the host a round, and the device `rounds`."""

    device = CPU
    index, stages = 0, 2  # not the last one

    def __init__(self, host: Host, device: Device, clock: Clock, rounds: int) -> None:
        self.host, self.own, self.clock, self.rounds = host, device, clock, rounds
        self.began: list[int] = []

    def carry_out(self, message: StageMessage) -> StageMessage:
        self.host.pause()
        stream = self.own.computing
        stream.run(lambda: self.began.append(self.clock.now), lambda: self.began[-1:] != [self.clock.now])
        stream.run(lambda: None, lambda: self.clock.now >= self.began[-1] + self.rounds)
        return message


class Head:
    """The head's `Receiver`: it takes back what is there before anything enters, as `Ring.step` does; as many
    works are in the ring as there are stages, and one more."""

    def __init__(self, back: NcclReceiver, host: Host) -> None:
        self.back, self.host, self.entered, self.in_ring = back, host, 0, 0

    def receive(self, wait_s: float | None) -> StageMessage:
        self.take_back(STAGES)
        self.entered, self.in_ring = self.entered + 1, self.in_ring + 1
        return StageMessage(MessageKind.ROWS, (MicroStep(0, self.entered - 1, 0, 4, 0),))

    def take_back(self, left: int) -> None:
        """What is there, and more until no more than `left` are in the ring. Mutates: self."""
        while self.in_ring:
            if self.back.receive(0.0) is not None:
                self.in_ring -= 1
            elif self.in_ring <= left:
                return
            else:
                self.host.pause()


def waits(monkeypatch: pytest.MonkeyPatch, forward: int = 1, record: int = 1, paced: bool = True) -> list[int]:
    """By rank, the rounds in which its device did nothing, between its first forward and its last. A forward takes
    `forward` rounds, a record `record`; the head takes back what its device has, if `paced`, or what was announced."""
    clock = Clock()
    hosts, devices = [Host() for _ in range(STAGES)], [Device() for _ in range(STAGES)]
    world = World(devices, 0)
    senders, receivers, stages = [], [], []
    for rank, device in enumerate(devices):
        after = (rank + 1) % STAGES
        full, empty = ([[RUBBISH, RUBBISH] for _ in range(nccl.SLOTS)] for _ in range(2))
        wire, records = Wire(device, devices[after], full, empty), Records(hosts[after], clock, record)
        monkeypatch.setattr(nccl, "TcpSender", lambda *given, records=records: records)
        monkeypatch.setattr(nccl, "TcpReceiver", lambda *given, records=records: records)
        senders.append(NcclSender(End(device, wire.send)))  # type: ignore[arg-type]
        end: Any = End(devices[after], wire.receive)
        receivers.append(NcclReceiver(end, paced=paced and after == 0))
        stages.append(Stage(hosts[rank], device, clock, forward))
    for rank, host in enumerate(hosts):
        receiver = Head(receivers[-1], host) if rank == 0 else receivers[rank - 1]
        worker = Worker(receiver, stages[rank], senders[rank])  # type: ignore[arg-type]
        host.start(partial(_run, worker, receiver if isinstance(receiver, Head) else None))
    while any(len(stage.began) < WORKS for stage in stages):
        for host in hosts:
            host.a_round()
        world.to_the_end()
        clock.now += 1
        assert clock.now < 10 * WORKS * forward
    return [stage.began[-1] - stage.began[0] - forward * (WORKS - 1) for stage in stages]


def _run(worker: Worker, head: Head | None) -> None:
    """All works; the head takes back what is left, as a send is not over before."""
    for _ in range(WORKS):
        worker.step(None)
    if head is not None:
        head.take_back(0)


@pytest.mark.parametrize("record", [0, 1])
@pytest.mark.parametrize("forward", [2, 8])
def test_devices_are_always_busy(forward: int, record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(monkeypatch, forward, record) == [0] * STAGES


def test_a_head_that_takes_back_what_its_device_has_not_makes_the_stages_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it was like, with records as fast as they are: a forward at a time in the whole ring."""
    assert waits(monkeypatch, 8, 0, paced=False) == [(STAGES - 1) * 8 * (WORKS - 1)] * STAGES


def test_a_record_that_leaves_with_its_tensors_lets_every_device_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hosts as slow as their devices and records that take as long: of two rounds a device works in one."""
    monkeypatch.setattr(NcclSender, "announce", lambda self, work: None)
    assert min(waits(monkeypatch)) > WORKS // 2
