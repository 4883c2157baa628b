"""The order on the device, against a device that does everything as late, or as early, as it may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from streamdiff.pipeline.distributed.cuda_streams import ReceiveLane, SendLane, Transfer
from streamdiff.pipeline.distributed.link import SLOTS
from tests.pipeline.distributed.fake_device import RUBBISH, Deaf, Device, Point, Slots, Wire, World

MESSAGES = 10
SEEDS = range(40)
Harm = Callable[[SendLane, ReceiveLane], None]


class Pair:
    """A rank that writes numbers and sends them, and one that reads them; `wrong` says what else was read."""

    def __init__(self, seed: int, harm: Harm | None) -> None:
        self.devices = [Device(), Device()]
        self.world = World(self.devices, seed)
        self.full: Slots = [[RUBBISH, RUBBISH] for _ in range(SLOTS)]
        self.empty: Slots = [[RUBBISH, RUBBISH] for _ in range(SLOTS)]
        self.wrong: list[str] = []
        for device, memory in zip(self.devices, (self.full, self.empty), strict=True):
            for slot in memory * 10:  # whoever had the memory before still uses it
                device.computing.run(lambda slot=slot: slot.__setitem__(slice(2), [RUBBISH, RUBBISH]))
        self.wire = Wire(*self.devices, self.full, self.empty)
        self.sending = SendLane(self.devices[0], self.wire.send)
        self.receiving = ReceiveLane(self.devices[1], self.wire.receive)
        self.records: deque[int] = deque()
        self.heard: deque[int] = deque()
        self.sent = self.read = self.checked = 0
        if harm is not None:
            harm(self.sending, self.receiving)

    def play(self, patience: int) -> None:
        """All messages; up to `patience` operations run between two calls of a host. Both hosts run ahead."""
        while self.read < MESSAGES:
            if self.world.chance.random() < 0.5:
                self.send()
            else:
                self.receive()
            self.world.a_while(patience)
        self.world.to_the_end()

    def send(self) -> None:
        if self.sent == MESSAGES or len(self.records) == 2 * SLOTS:
            return
        number, computing = self.sent, self.devices[0].computing

        def write(slot: int) -> None:
            computing.run(lambda: self.full[slot].__setitem__(0, number))
            computing.run(lambda: self.full[slot].__setitem__(1, number))

        self.records.append(number)
        self.sending.send(write)
        self.sent += 1

    def receive(self) -> None:
        self.receiving.release()
        while self.records and len(self.heard) < SLOTS:
            self.heard.append(self.records.popleft())
            self.receiving.announce()
        if self.heard:
            number, slot = self.heard.popleft(), self.receiving.take()
            for half in (0, 1, 0):
                self.devices[1].computing.run(lambda half=half: self._check(number, slot, half))
            self.read += 1

    def _check(self, number: int, slot: int, half: int) -> None:
        self.checked += 1
        if self.empty[slot][half] != number:
            self.wrong.append(f"half {half} of message {number} is {self.empty[slot][half]}")


def faults(harm: Harm | None = None) -> list[str]:
    """What goes wrong, by seed; half of the seeds let nothing run before both hosts are done."""
    found = []
    for seed in SEEDS:
        pair = Pair(seed, harm)
        pair.play(patience=8 * (seed % 2))
        found += [f"seed {seed}: {wrong}" for wrong in pair.wrong]
        if pair.checked < 3 * MESSAGES or pair.world.left:
            found.append(f"seed {seed}: stands still with {pair.checked} checks done and {pair.world.left} left")
    return found


def test_every_message_is_read_as_it_was_written() -> None:
    found = faults()
    assert not found, "\n".join(found)


def deafen(lane: SendLane | ReceiveLane, name: str) -> None:
    """Nobody waits for the events `name` of the lane."""
    events = [Deaf() for _ in range(SLOTS)]
    for event, real in zip(events, getattr(lane, name), strict=True):
        event.point = real.point
    setattr(lane, name, events)


def no_wait(lane: SendLane | ReceiveLane) -> None:
    """Nobody waits for the lane's transfers."""

    start = lane._start

    def forgetful(slot: int) -> Transfer:
        start(slot)
        return lambda: None

    lane._start = forgetful


def forget_what_was_before(lane: ReceiveLane) -> None:
    """Nobody waits for what the slots' memory was used for before there was a lane."""
    for event in lane._read:
        event.point = Point(True)


HARMS: dict[str, Harm] = {
    "sent before it is written": lambda sending, receiving: deafen(sending, "_written"),
    "written while it is sent": lambda sending, receiving: deafen(sending, "_done"),
    "the end of a send forgotten": lambda sending, receiving: no_wait(sending),
    "read before it is received": lambda sending, receiving: deafen(receiving, "_done"),
    "received while it is read": lambda sending, receiving: deafen(receiving, "_read"),
    "the end of a receive forgotten": lambda sending, receiving: no_wait(receiving),
    "received while the memory is used": lambda sending, receiving: forget_what_was_before(receiving),
}


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
def test_each_wait_is_needed(harm: str) -> None:
    found = faults(HARMS[harm])
    assert any(" of message " in what for what in found)


def test_receives_are_posted_before_their_data_and_never_more_than_slots() -> None:
    pair = Pair(0, None)
    pair.receive()
    assert pair.wire.receives == 0, "the device waits for nothing that may not come"
    for _ in range(2 * SLOTS):
        pair.send()
    pair.receive()
    assert pair.wire.receives == SLOTS, "both announced messages, before either was read and before anything ran"
    assert not pair.wire.messages
    pair.receive()
    assert pair.wire.receives == SLOTS + 1, "one was released"


@pytest.mark.parametrize("messages", [1, 2, 3])
def test_drained_is_sent(messages: int) -> None:
    pair = Pair(messages, None)
    for _ in range(messages):
        pair.send()
        pair.receive()
    pair.sending.drain()
    assert pair.wire.ended == set(range(messages))
