"""A backend of torch.distributed that behaves as NCCL, on the CPU, below the NCCL link: it runs the product's own code.

What it has of NCCL, and gloo has not: at the first send, and at the first receive, of a communicator the host waits for
the peer's call. Transfers run later, in order, on a thread of the communicator; one begins after what the stream was
given that was current when it was issued. A send ends when its receive has begun, or before, as long as no more than
`Backend.capacity` messages are unmatched. A receive fills its slot with rubbish until the message is there. `wait`
orders streams: it never makes the host wait, and says nothing of an abort or of a peer that died.

The device computes when the host calls, so the host waits where computing has to wait for a transfer. What cannot come
any more (the peer died) leaves the device stuck while the host goes on, as it does with CUDA.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from streamdiff.pipeline import topology
from streamdiff.pipeline.distributed import nccl

NAME = "rendezvous"
PATIENCE_S = 300.0
"""How long a host may wait for a transfer before that counts as a lock."""
RUBBISH = 0x7F  # 3.4e38 as float32
LOOK_S = 0.02


class Locked(Exception):
    """Everybody waits for somebody who waits; says who for what."""


class Point:
    """A point in the order of the device: `passed`, or never to be reached, since the peer is gone."""

    pending: ClassVar[set[Point]] = set()
    """Of this process: neither passed nor lost."""

    def __init__(self, name: str) -> None:
        self.name, self.lost, self._settled = name, False, threading.Event()
        Point.pending.add(self)

    @property
    def passed(self) -> bool:
        return self._settled.is_set() and not self.lost

    def settle(self, lost: bool = False) -> None:
        if not self._settled.is_set():
            self.lost = lost
            self._settled.set()
            Point.pending.discard(self)

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until it is passed or lost; whether it is."""
        return self._settled.wait(limit_s)


class Stream:
    """What was given to a stream here takes no time; so it is what the stream has to wait for."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def wait_for(self, points: Iterable[Point]) -> None:
        self.points = [point for point in {*self.points, *points} if not point.passed]


class ComputeStream(Stream):
    """The host computes, so it waits. A lost point stays: what the stream is given after it never runs."""

    def wait_for(self, points: Iterable[Point]) -> None:
        for point in points:
            if not point.wait(PATIENCE_S):
                raise Locked(f"computing waits for {point.name}")
        super().wait_for(points)


class Event:
    """As CUDA's: a wait is for what was recorded last when it was called."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def record(self, stream: Stream) -> None:
        self.points = list(stream.points)

    def wait(self, stream: Stream) -> None:
        stream.wait_for(self.points)

    def synchronize(self) -> None:
        for point in self.points:
            if not point.wait(PATIENCE_S) or point.lost:
                raise Locked(f"the host waits for {point.name}")


class Streams:
    """Of this process's device."""

    compute = ComputeStream()
    _current = threading.local()

    def current(self) -> Stream:
        return getattr(self._current, "stream", self.compute)

    def new(self) -> Stream:
        return Stream()

    def event(self) -> Event:
        return Event()

    def when(self, event: Event, call: Callable[[], None]) -> None:
        points = list(event.points)

        def run() -> None:
            if all([point.wait() and not point.lost for point in points]):
                call()

        threading.Thread(target=run, name="arrivals", daemon=True).start()

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before


STREAMS = Streams()


class Work(dist.Work):
    """A transfer that ends at `end`."""

    def __init__(self, end: Point) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        STREAMS.current().wait_for([self.end])
        return True


class Transfer(NamedTuple):
    """`after` is what it begins after, `end` its end."""

    sends: bool
    buffer: torch.Tensor
    after: list[Point]
    end: Point


class Backend(dist.ProcessGroup):
    """A communicator of two ranks."""

    capacity = 0
    """Messages that a communicator made from now on takes before anybody receives them."""

    def __init__(self, store: Store, everybody: Store, rank: int, ranks: list[int], name: str) -> None:
        """`store` is the communicator's own, `everybody` that of all ranks; `ranks` are its two, by what everybody
        calls them, and `name` tells communicators apart."""
        super().__init__(rank, len(ranks))
        self._everybody, self._rank, self._name = everybody, rank, name
        self._me, self._peer = ranks[rank], ranks[1 - rank]
        data = PrefixStore("data", store)
        self._data = dist.ProcessGroupGloo(data, rank, len(ranks), timedelta(days=3650))  # type: ignore[call-arg]
        self._capacity, self._unmatched = self.capacity, deque[tuple[dist.Work, torch.Tensor]]()
        self._transfers: SimpleQueue[Transfer] = SimpleQueue()
        self._connected, self._aborted, self._issued = set[str](), False, 0
        threading.Thread(target=self._run, name="communicator", daemon=True).start()

    def getBackendName(self) -> str:
        return NAME

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> Work:  # type: ignore[override]
        return self._issue("send", tensors[0])

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> Work:  # type: ignore[override]
        return self._issue("receive", tensors[0])

    def abort(self) -> None:
        """End what is under way, here; the peer hears nothing. Whoever waits sees no difference."""
        self._aborted = True
        for point in list(Point.pending):
            if point.name.startswith(f"{self._name}: "):
                point.settle()

    def _issue(self, role: str, buffer: torch.Tensor) -> Work:
        if self._aborted:
            raise RuntimeError("the communicator was aborted")
        if role not in self._connected:
            self._connect(role)
        end = Point(f"{self._mark(role, self._me)}, transfer {self._issued}")
        self._issued += 1
        self._transfers.put(Transfer(role == "send", buffer, list(STREAMS.current().points), end))
        return Work(end)

    # ---- first use ---------------------------------------------------------------------------------------------------

    def _connect(self, role: str) -> None:
        """Wait for the peer's call of the other role.

        Raises:
            Locked: it never comes, since the peer waits for another rank in the same way, and so on around.
        """
        mine, theirs = self._mark(role, self._me), self._mark({"send": "receive", "receive": "send"}[role], self._peer)
        self._everybody.set(mine, "")
        self._everybody.set(f"waits/{self._me}", json.dumps([mine, theirs, self._peer]))
        before: list[str] | None = None
        while not self._everybody.check([theirs]):
            around = self._who_waits()
            if around is not None and around == before:  # looked at twice: all of it stood at the same time
                for mark in around:
                    self._everybody.set(f"locked/{mark}", f"each waits for the next: {'; '.join(around)}")
            if self._everybody.check([f"locked/{mine}"]):
                raise Locked(self._everybody.get(f"locked/{mine}").decode())
            before = around
            threading.Event().wait(LOOK_S)
        self._connected.add(role)

    def _mark(self, role: str, rank: int) -> str:
        return f"{self._name}: {role} of rank {rank}"

    def _who_waits(self) -> list[str] | None:
        """The row of first uses that each wait for the rank of the next, this one's first, when it leads around."""
        row: list[str] = []
        rank = self._me
        while self._everybody.check([f"waits/{rank}"]):
            mine, theirs, rank = json.loads(self._everybody.get(f"waits/{rank}"))
            if mine in row:
                return row
            if self._everybody.check([theirs]) or self._everybody.check([f"locked/{mine}"]):
                return None  # it waits no more
            row.append(mine)
        return None

    # ---- the device's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            transfer = self._transfers.get()
            for point in transfer.after:
                point.wait()
            lost = any(point.lost for point in transfer.after)
            try:
                if not lost:
                    self._send(transfer.buffer) if transfer.sends else self._receive(transfer.buffer)
            except RuntimeError:  # the peer died
                lost = True
            transfer.end.settle(lost)

    def _send(self, buffer: torch.Tensor) -> None:
        message = buffer.clone()
        self._unmatched.append((self._data.send([message], 1 - self._rank, 0), message))
        while len(self._unmatched) > self._capacity:
            self._unmatched.popleft()[0].wait()
        assert torch.equal(message, buffer), "a slot was written while it was sent"

    def _receive(self, buffer: torch.Tensor) -> None:
        buffer.fill_(RUBBISH)
        self._data.recv([buffer], 1 - self._rank, 0).wait()


def _create(options: Any, _: object) -> Backend:
    ranks = list(options.global_ranks_in_group)
    return Backend(options.store, _get_default_store(), options.group_rank, ranks, f"group {options.group_id}")


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def join_ring(rank: int, ranks: int, port: int) -> dist.Store:
    """Join the gloo group of a test's processes, after `use_rendezvous`. Returns its store, at `port` of rank 0."""
    use_rendezvous()
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(days=3650))
    return store


def use_rendezvous() -> None:
    """Have the product make its groups and streams of the stand-ins. Mutates: the product's modules."""
    topology.edge_groups = partial(nccl.edge_groups, backend=NAME)
    nccl.CudaStreams = lambda device: STREAMS  # type: ignore[misc, assignment]
