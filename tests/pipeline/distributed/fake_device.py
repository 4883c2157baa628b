"""A device that runs what it was given in any order that its streams and events allow, and a wire between two of them.

For tests of the order: the host's calls return at once, everything happens later, in turns that chance decides. A slot
has two halves, so that whoever touches it at the wrong time is seen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from streamdiff.pipeline.distributed.cuda_streams import Transfer


@dataclass
class Point:
    """What an event stands for once it was recorded."""

    passed: bool = False


@dataclass
class Stream:
    """Operations in order; each runs when it may."""

    operations: deque[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=deque)

    def run(self, operation: Callable[[], None], may: Callable[[], bool] = lambda: True) -> None:
        self.operations.append((may, operation))

    def mark(self) -> Point:
        point = Point()
        self.run(lambda: setattr(point, "passed", True))
        return point

    def wait_for(self, point: Point) -> None:
        self.run(lambda: None, lambda: point.passed)


class Event:
    """As CUDA's: a wait is for what was recorded last when it was called."""

    def __init__(self, world: World | None = None) -> None:
        self.point, self.world = Point(True), world

    def record(self, stream: Stream) -> None:
        self.point = stream.mark()

    def wait(self, stream: Stream) -> None:
        stream.wait_for(self.point)

    def synchronize(self) -> None:
        assert self.world is not None
        self.world.until(lambda: self.point.passed)


class Deaf(Event):
    """An event that nobody waits for: what a forgotten line does."""

    def wait(self, stream: Stream) -> None:
        pass


class Device:
    """`Streams` of one rank."""

    def __init__(self) -> None:
        self.computing = Stream()
        self.streams = [self.computing]
        self.world: World | None = None
        self._current = self.computing

    def current(self) -> Stream:
        return self._current

    def new(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def event(self) -> Event:
        return Event(self.world)

    def when(self, event: Event, call: Callable[[], None]) -> None:
        watch = self.new()
        watch.wait_for(event.point)
        watch.run(call)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before


def _ends_at(device: Device, end: Point) -> Transfer:
    return lambda: device.current().wait_for(end)


RUBBISH = -1
Slots = list[list[int]]


class Wire:
    """Both ends of a communicator: sends and receives in the order they were started, each on its end's own stream.

    A send reads its slot once when it begins and once when it ends, which is not before the receive has begun; a
    receive fills its slot with rubbish when it begins.
    """

    def __init__(self, sender: Device, receiver: Device, full: Slots, empty: Slots) -> None:
        self.sender, self.receiver, self.full, self.empty = sender, receiver, full, empty
        self.out, self.into = sender.new(), receiver.new()
        self.sends = self.receives = 0
        self.begun = 0
        self.messages: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    def send(self, slot: int) -> Transfer:
        number, self.sends = self.sends, self.sends + 1
        self.out.wait_for(self.sender.current().mark())
        self.out.run(lambda: self.messages.update({number: [self.full[slot][0]]}))
        self.out.run(lambda: self._sent(number, slot), lambda: self.begun > number)
        return _ends_at(self.sender, self.out.mark())

    def receive(self, slot: int) -> Transfer:
        number, self.receives = self.receives, self.receives + 1
        self.into.wait_for(self.receiver.current().mark())
        self.into.run(lambda: self._begin(slot))
        self.into.run(lambda: self._end(number, slot), lambda: number in self.ended)
        return _ends_at(self.receiver, self.into.mark())

    def _sent(self, number: int, slot: int) -> None:
        self.messages[number].append(self.full[slot][1])
        self.ended.add(number)

    def _begin(self, slot: int) -> None:
        self.begun += 1
        self.empty[slot][:] = [RUBBISH, RUBBISH]

    def _end(self, number: int, slot: int) -> None:
        self.empty[slot][:] = self.messages[number]


class World:
    """Runs the operations of all devices, one at a time, from a stream that chance picks."""

    def __init__(self, devices: list[Device], seed: int) -> None:
        self.devices, self.chance = devices, random.Random(seed)
        for device in devices:
            device.world = self

    def a_while(self, most: int) -> None:
        """Up to `most` operations, or fewer when none may run."""
        for _ in range(self.chance.randint(0, most)):
            if not self._step():
                return

    def to_the_end(self) -> None:
        """All that may run."""
        while self._step():
            pass

    def until(self, done: Callable[[], bool]) -> None:
        """No more than it takes."""
        while not done():
            assert self._step(), "the host waits for ever"

    @property
    def left(self) -> int:
        """Operations that were given and have not run."""
        return sum(len(stream.operations) for device in self.devices for stream in device.streams)

    def _step(self) -> bool:
        streams = [stream for device in self.devices for stream in device.streams if stream.operations]
        may = [stream for stream in streams if stream.operations[0][0]()]
        if may:
            self.chance.choice(may).operations.popleft()[1]()
        return bool(may)
