"""Busy time of a rank's device, and detection of a hang: a pair of events around every piece of work.

A GPU carries out later what it is handed now, so the host's clock says nothing about it. Events are recorded on the
stream that computes and read when they have come to pass; the host never waits for one. On a CPU the host is the
device, and the same is done with the host's clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from streamdiff import clock

_KEPT = 16
_UNREAD = 32


class HostEvent:
    """An event in a stream, with the interface of a timing `torch.cuda.Event`.

    For a CPU, where work is done when the call returns: reads the host's clock.
    """

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        """Record the event after all work queued so far on the calling thread's current stream."""
        self._at_s = clock.monotonic_s()

    def query(self) -> bool:
        """Whether the device has reached the event. Does not wait."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`, negative if that came first; the device has reached both."""
        return float(end_event._at_s - self._at_s) * 1000


class CudaEvent(HostEvent):
    """A CUDA event on the calling thread's current stream of `device`, whatever the thread's current device is."""

    def __init__(self, device: torch.device) -> None:
        self._event, self._device = torch.cuda.Event(enable_timing=True), device

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def elapsed_time(self, end_event: Any) -> float:
        return float(self._event.elapsed_time(end_event._event))


class BusyTime:
    """Total length of the union of intervals, which may overlap. Sans-IO."""

    def __init__(self) -> None:
        self._before_s = 0.0  # covered by intervals that are not kept
        self._until_s = float("-inf")  # where these end
        self._latest: list[tuple[float, float]] = []  # apart from each other, in order

    def add(self, begin_s: float, end_s: float) -> None:
        """Add an interval; intervals come roughly in the order of their ends. Mutates: self."""
        if self._latest and begin_s > self._latest[-1][1]:
            self._latest.append((begin_s, end_s))  # as nearly always
        else:
            begin_s, end_s = max(begin_s, self._until_s), max(end_s, self._until_s)
            touched = [(a, b) for a, b in self._latest if b >= begin_s and a <= end_s]
            whole = min([begin_s, *(a for a, _ in touched)]), max([end_s, *(b for _, b in touched)])
            self._latest = sorted([*(each for each in self._latest if each not in touched), whole])
        if len(self._latest) > _KEPT:
            first, self._until_s = self._latest.pop(0)
            self._before_s += self._until_s - first

    @property
    def total_s(self) -> float:
        """Seconds covered so far; never decreases."""
        return self._before_s + sum(end - begin for begin, end in self._latest)


class _Timed:
    """A piece of work between two events; `what` says what it is, for messages. While handed over it is a context,
    which puts it among `pending` unless an error ends it: a generator would cost twice the calls, at every micro-step.
    """

    def __init__(self, what: object, new_event: Callable[[], HostEvent], pending: deque[_Timed]) -> None:
        self.what, self.begin, self.end, self._pending = what, new_event(), new_event(), pending

    def __enter__(self) -> None:
        self.begin.record()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.end.record()
            self._pending.append(self)


class DeviceTimer:
    """Measures all streams of one rank. Each stream's work is recorded by the one thread that computes on it;
    everything else may be called from any thread."""

    def __init__(self, new_event: Callable[[], HostEvent] = HostEvent) -> None:
        self.new_event = new_event
        self.hung = False
        """Whether `stuck` has found that the device does not get on."""
        self._lock = threading.Lock()
        self._busy = BusyTime()
        self._origin: HostEvent | None = None
        self._origin_s = 0.0
        self._streams: list[StreamTimer] = []

    @classmethod
    def on(cls, device: torch.device) -> DeviceTimer:
        """A timer for work on `device`."""
        return cls((lambda: CudaEvent(device)) if device.type == "cuda" else HostEvent)

    def stream(self) -> StreamTimer:
        """Add a stream. Mutates: self."""
        self._streams.append(StreamTimer(self))
        return self._streams[-1]

    @property
    def busy_s(self) -> float:
        """Seconds for which the device was busy, on any stream, with work that is finished by now."""
        with self._lock:
            self._read()
            return self._busy.total_s

    def read(self) -> None:
        """Collect finished work, unless another thread does so already. Mutates: self."""
        if self._lock.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._lock.release()

    def stuck(self, now_s: float, limit_s: float) -> str | None:
        """The work that the device has not finished for `limit_s`, as of `now_s`; None if it makes progress.

        Work that has not begun waits for something else, such as another rank's message, whose rank should report the
        cause; it is reported only after twice `limit_s`. Call it regularly: time counts from the call that first saw
        the work at the head of its stream. Mutates: self.
        """
        with self._lock:
            self._read()
            for stream in self._streams:
                if (why := stream.stuck(now_s, limit_s)) is not None:
                    self.hung = True
                    return why
        return None

    def _read(self) -> None:
        for stream in self._streams:
            for timed in stream.take_finished():
                self._count(timed)

    def _count(self, timed: _Timed) -> None:
        """Add a finished work to the busy time. Mutates: self."""
        if self._origin is None:
            self._origin = timed.begin
        # Events measure in float32: from one to the next, so that it stays exact however long the rank runs.
        begin_s = self._origin_s + self._origin.elapsed_time(timed.begin) / 1000
        end_s = begin_s + timed.begin.elapsed_time(timed.end) / 1000
        self._busy.add(begin_s, end_s)
        self._origin, self._origin_s = timed.end, end_s


class StreamTimer:
    """Work on one stream, which the device executes in order. All who work on it share it: what comes in order is
    counted quickly, works of several streams are put in order first."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._pending: deque[_Timed] = deque()
        self._finished = 0
        self._seen: tuple[int, bool] | None = None
        self._since_s = 0.0

    def work(self, what: object) -> AbstractContextManager[None]:
        """Context manager: times what the calling thread enqueues within. `what` names it, and is kept until the device
        is done, so it should hold no tensors. Not counted if an error ends it. Mutates: self."""
        if len(self._pending) >= _UNREAD:  # who wants to know looks by himself; this only bounds what is kept
            self._timer.read()
        return _Timed(what, self._timer.new_event, self._pending)

    def take_finished(self) -> Iterator[_Timed]:
        """Works that are done and were not returned yet. With the timer's lock. Mutates: self."""
        while self._pending and self._pending[0].end.query():
            self._finished += 1
            yield self._pending.popleft()

    def stuck(self, now_s: float, limit_s: float) -> str | None:
        """See `DeviceTimer.stuck`. With the timer's lock. Mutates: self."""
        if not self._pending:
            self._seen = None
            return None
        oldest = self._pending[0]
        begun = oldest.begin.query()
        if self._seen != (self._finished, begun):
            self._seen, self._since_s = (self._finished, begun), now_s
        limit_s = limit_s if begun else 2 * limit_s
        if now_s - self._since_s < limit_s:
            return None
        return f"its device {'is at' if begun else 'waits to begin'} {oldest.what} for {limit_s:g} s"
