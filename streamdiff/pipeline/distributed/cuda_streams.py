"""Lanes: the order of computing and transfers over the two slots of one end of a link, on the device.

The host only enqueues. Computing runs on the caller's current stream, transfers on a stream of the lane; what runs when
is said by events, both ways: nobody sends or reads what is still being written, and nobody writes what is still being
sent or read. Streams, events and transfers are given, so that tests can play an adversary
(`tests/pipeline/distributed/test_cuda_streams.py`), and so that the same code runs without a GPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from streamdiff.device import bind
from streamdiff.pipeline.distributed.link import SLOTS, NoLink
from streamdiff.pipeline.distributed.message import StageMessage


class Event(Protocol):
    """A point in the order of a stream. To wait for one that was never recorded is to wait for nothing."""

    def record(self, stream: Any) -> None:
        """Stand behind everything that `stream` was given until now."""

    def wait(self, stream: Any) -> None:
        """What `stream` is given from now on runs after this event as it was recorded last. The host continues."""

    def synchronize(self) -> None:
        """The host waits."""


class Streams(Protocol):
    """Where streams and events come from."""

    def current(self) -> Any:
        """The stream the caller computes on."""

    def new(self) -> Any:
        """A stream of its own."""

    def event(self) -> Event: ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the current one within."""

    def when(self, event: Event, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, once `event`, as it was recorded last, is past; one after the other."""


class CudaStreams:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=-1)  # of the pool from which nobody takes who must not wait

    def event(self) -> Event:
        event: Event = torch.cuda.Event(blocking=True)  # who synchronises with it sleeps
        return event

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def when(self, event: Event, call: Callable[[], None]) -> None:
        self._awaited.put((event, call))

    @cached_property
    def _awaited(self) -> queue.SimpleQueue[tuple[Event, Callable[[], None]]]:
        awaited: queue.SimpleQueue[tuple[Event, Callable[[], None]]] = queue.SimpleQueue()

        def run() -> None:
            bind(self.device)
            while True:
                event, call = awaited.get()
                # A CUDA error stays with the process: whoever is woken meets it at its next call, and reports it.
                with suppress(RuntimeError):
                    event.synchronize()
                call()

        threading.Thread(target=run, name="transfers", daemon=True).start()
        return awaited


class PacedNoLink(NoLink):
    """The ring of one stage whose host is at most one forward ahead of its device: a message comes back when the
    forward before it is done. So chunks are admitted, and prompts and controls fixed, when the device can begin soon.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self._call: Callable[[], None] = lambda: None
        self._before = self._latest = threading.Event()
        self._latest.set()

    def send(self, message: StageMessage) -> None:
        super().send(message)
        self._before, self._latest = self._latest, threading.Event()
        event = self._streams.event()
        event.record(self._streams.current())
        self._streams.when(event, partial(self._done, self._latest))

    def _done(self, forward: threading.Event) -> None:
        forward.set()
        self._call()

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        return super().receive() if self._messages and self._before.wait(wait_s) else None

    def notify(self, call: Callable[[], None]) -> None:
        self._call = call


def one_stage_link(device: torch.device) -> NoLink:
    """The ring of one stage on `device`."""
    return PacedNoLink(CudaStreams(device)) if device.type == "cuda" else NoLink()


Transfer = Callable[[], object]
"""A send or a receive under way, which is started and called with the lane's stream as the current one: what that is
given from then on runs after the transfer."""


class _Lane:
    """The stream of one end of a link, and a transfer under way for each of its slots."""

    def __init__(self, streams: Streams, start: Callable[[int], Transfer]) -> None:
        """`start` begins the transfer of the slot it is given."""
        self._streams, self._start = streams, start
        self._stream = streams.new()
        self._done = [streams.event() for _ in range(SLOTS)]
        """Of each slot the point behind its last transfer that was settled."""
        self._under_way: list[Transfer | None] = [None] * SLOTS

    def _begin(self, slot: int, free: Event) -> None:
        """Start a slot's transfer behind `free`. It is held until the stream waits for it. Mutates: self."""
        free.wait(self._stream)
        with self._streams.use(self._stream):
            self._under_way[slot] = self._start(slot)

    def _settle(self, slot: int) -> Event:
        """Put the event that is returned behind the slot's transfer. Mutates: self."""
        transfer, self._under_way[slot] = self._under_way[slot], None
        if transfer is not None:
            with self._streams.use(self._stream):
                transfer()
            self._done[slot].record(self._stream)
        return self._done[slot]


class SendLane(_Lane):
    """Sends message n from slot n modulo `SLOTS`."""

    def __init__(self, streams: Streams, start: Callable[[int], Transfer]) -> None:
        super().__init__(streams, start)
        self._written = [streams.event() for _ in range(SLOTS)]
        self._count = 0

    def send(self, write: Callable[[int], None]) -> None:
        """Have the current stream `write` the next slot, then send it. Mutates: self."""
        slot = self._count % SLOTS
        self._count += 1
        compute = self._streams.current()
        self._settle(slot).wait(compute)
        write(slot)
        self._written[slot].record(compute)
        self._begin(slot, self._written[slot])

    def drain(self) -> None:
        """Wait on the host until everything has been sent. For the start and the end, never in a micro-step."""
        for slot in range(SLOTS):
            self._settle(slot).synchronize()


class ReceiveLane(_Lane):
    """Receives message n into slot n modulo `SLOTS`.

    A receive is posted as soon as its slot is free and its message is announced, which is while the other rank still
    computes it. Not earlier: with receives always pending, anything that waits for the whole device (a first call that
    loads a kernel, memory given back, a graph captured) would wait for the next message. See
    docs/decisions/0010-links.md.
    """

    def __init__(self, streams: Streams, start: Callable[[int], Transfer]) -> None:
        super().__init__(streams, start)
        self._read = [streams.event() for _ in range(SLOTS)]
        for event in self._read:  # the slots' memory may have been something else, which the caller's stream still uses
            event.record(streams.current())
        self._announced = self._posted = self._taken = self._released = 0

    def announce(self) -> None:
        """One more message is on its way. Mutates: self."""
        self._announced += 1
        self._post()

    def arrival(self) -> Event:
        """What is past when the next message, which was announced, is there. Mutates: self."""
        assert self._taken < self._posted, "only what was announced, after what was taken before was released"
        return self._settle(self._taken % SLOTS)

    def take(self) -> int:
        """The slot of the next message; the current stream may read it. Mutates: self.

        Only what was announced may be taken, and only after what was taken before was released.
        """
        self.arrival().wait(self._streams.current())
        self._taken += 1
        return (self._taken - 1) % SLOTS

    def release(self) -> None:
        """The current stream has been given everything that reads what was taken. Mutates: self."""
        if self._released < self._taken:
            self._read[self._released % SLOTS].record(self._streams.current())
            self._released += 1
        self._post()

    def drain(self) -> None:
        """Wait on the host until everything that was taken has been received. For the start, never in a micro-step."""
        for received in self._done:
            received.synchronize()

    def _post(self) -> None:
        while self._posted < min(self._released + SLOTS, self._announced):
            slot = self._posted % SLOTS
            self._posted += 1
            self._begin(slot, self._read[slot])
