"""Four stages over the NCCL link's own code, hosts as slow as their devices, records that take as long: who waits?

Time goes in rounds. In a round a device computes one forward, a host hands one work to its device, and a record comes
to the next host. Transfers end as soon as both ends are there.
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

from streamdiff.pipeline.distributed import nccl
from streamdiff.pipeline.distributed.message import MessageKind, MessageLayout, StageMessage
from streamdiff.pipeline.distributed.nccl import NcclReceiver, NcclSender
from streamdiff.pipeline.runner.worker import Worker
from streamdiff.pipeline.scheduler.step import MicroStep
from tests.pipeline.distributed.fake_device import RUBBISH, Device, Wire, World
from tests.small import CPU

STAGES, WORKS = 4, 40
BARE = MessageLayout(1, (), None)
LIMIT_S = 60.0


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
    on_the_way: deque[tuple[int, StageMessage]] = field(default_factory=deque)
    ready: bool = True

    def send(self, work: StageMessage) -> None:
        self.on_the_way.append((self.clock.now + 1, work))

    def receive(self, wait_s: float | None) -> StageMessage:
        while not self.on_the_way or self.on_the_way[0][0] > self.clock.now:
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
    records: None = None

    def slots(self, operation: object) -> tuple[list[torch.Tensor], Callable[[int], Any]]:
        return [torch.empty(0, dtype=torch.uint8)] * nccl.SLOTS, self.start


class Stage:
    """Hands forwards to a device; that takes the host a round, and the device another."""

    device = CPU
    index, stages = 0, 2  # not the last one

    def __init__(self, host: Host, device: Device, clock: Clock) -> None:
        self.host, self.own, self.clock = host, device, clock
        self.began: list[int] = []

    def carry_out(self, message: StageMessage) -> StageMessage:
        self.host.pause()
        stream = self.own.computing
        stream.run(lambda: self.began.append(self.clock.now), lambda: self.began[-1:] != [self.clock.now])
        stream.run(lambda: None, lambda: self.clock.now > self.began[-1])
        return message


class Head:
    """The head's `Receiver`: as many works as there are stages, each of which lets in another when it is back."""

    def __init__(self, back: NcclReceiver) -> None:
        self.back, self.entered = back, 0

    def receive(self, wait_s: float | None) -> StageMessage:
        if self.entered >= STAGES:
            self.back.receive(None)
        self.entered += 1
        return StageMessage(MessageKind.ROWS, (MicroStep(0, self.entered - 1, 0, 4, 0),))


def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By rank, the rounds in which its device began no forward, between its first and its last."""
    clock = Clock()
    hosts, devices = [Host() for _ in range(STAGES)], [Device() for _ in range(STAGES)]
    world = World(devices, 0)
    senders, receivers, stages = [], [], []
    for rank, device in enumerate(devices):
        after = (rank + 1) % STAGES
        full, empty = ([[RUBBISH, RUBBISH] for _ in range(nccl.SLOTS)] for _ in range(2))
        wire, records = Wire(device, devices[after], full, empty), Records(hosts[after], clock)
        monkeypatch.setattr(nccl, "TcpSender", lambda *given, records=records: records)
        monkeypatch.setattr(nccl, "TcpReceiver", lambda *given, records=records: records)
        senders.append(NcclSender(End(device, wire.send)))  # type: ignore[arg-type]
        receivers.append(NcclReceiver(End(devices[after], wire.receive)))  # type: ignore[arg-type]
        stages.append(Stage(hosts[rank], device, clock))
    for rank, host in enumerate(hosts):
        receiver = Head(receivers[-1]) if rank == 0 else receivers[rank - 1]
        worker = Worker(receiver, stages[rank], senders[rank])  # type: ignore[arg-type]
        last = receivers[-1] if rank == 0 else None
        host.start(partial(_run, worker, last))
    while any(len(stage.began) < WORKS for stage in stages):
        for host in hosts:
            host.a_round()
        world.to_the_end()
        clock.now += 1
        assert clock.now < 10 * WORKS
    return [stage.began[-1] - stage.began[0] + 1 - WORKS for stage in stages]


def _run(worker: Worker, last: NcclReceiver | None) -> None:
    """All works; the head takes back what is left, as a send is not over before."""
    for _ in range(WORKS):
        worker.turn(None)
    for _ in range(STAGES if last is not None else 0):
        assert last is not None and last.receive(None) is not None


def test_a_host_one_work_ahead_keeps_its_device_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(monkeypatch) == [0] * STAGES


def test_a_record_that_leaves_with_its_tensors_lets_every_device_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was like: of two rounds a device works in one."""
    monkeypatch.setattr(NcclSender, "announce", lambda self, work: None)
    assert min(waits(monkeypatch)) > WORKS // 2
