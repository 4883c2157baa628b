"""TCP links that do their worst within what a link may do, and two that do a little more.

They change when things happen and what lies in slots that nobody may read; the loops are the product's own. What a ring
computes over the rough ones must not differ by a bit. The hasty and the eager one each leave out one ordering.
"""

from __future__ import annotations

import random
from queue import SimpleQueue
from threading import Event
from typing import Any

from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.distributed.tcp import TcpReceiver, TcpSender

PAUSES_S = (0.0, 0.0, 0.001, 0.01)
RUBBISH = 0x7F  # 3.4e38 as float32 and as bfloat16; no kind of work


class Pauses:
    """Waits now and then; when, follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.chance, self.never = random.Random(seed), Event()

    def __call__(self) -> None:
        self.never.wait(self.chance.choice(PAUSES_S))


class Scribbling(SimpleQueue[int | None]):
    """Free slots: fills a slot with rubbish as soon as it is declared free."""

    def __init__(self, slots: list[memoryview]) -> None:
        super().__init__()
        self.slots = slots

    def put(self, slot: int | None, *rest: Any) -> None:
        if slot is not None:
            self.slots[slot][:] = bytes([RUBBISH]) * len(self.slots[slot])
        super().put(slot, *rest)


class RoughSender(TcpSender):
    """Messages leave late; a slot holds rubbish once it is free."""

    def __init__(self, wire: Any, peer: int, tag: int) -> None:
        super().__init__(wire, peer, tag)
        self._pause = Pauses(tag)
        self._free = Scribbling(self._slots.bytes)
        for slot in range(len(self._slots.bytes)):
            self._free.put(slot)

    def _push(self, data: memoryview) -> int:
        """Takes a part now and then, and leaves the rest to the thread."""
        self._pause()
        return super()._push(data[: self._pause.chance.choice((0, 1000, len(data)))])


class RoughReceiver(TcpReceiver):
    """Slots are free late, and hold rubbish then."""

    def __init__(self, wire: Any, peer: int, tag: int, *rest: Any) -> None:
        self._pause = Pauses(-1 - tag)
        super().__init__(wire, peer, tag, *rest)

    def _post(self, slot: int) -> None:
        self._slots.bytes[slot][:] = bytes([RUBBISH]) * len(self._slots.bytes[slot])
        self._pause()
        super()._post(slot)


class HastySender(RoughSender):
    """Broken: does not wait until a message has left before its slot is free."""

    def _start(self, slot: int) -> None:
        self._free.put(slot)
        self._connection.sendall(self._slots.bytes[slot])


class EagerInbox(RoughReceiver):
    """Broken: gives a slot back before what was received has been read."""

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        work = super().receive(wait_s)
        self._release()
        return work


LINKS: dict[str, tuple[type[TcpSender], type[TcpReceiver]]] = {
    "plain": (TcpSender, TcpReceiver),
    "rough": (RoughSender, RoughReceiver),
    "hasty": (HastySender, RoughReceiver),
    "eager": (RoughSender, EagerInbox),
    "lanes": (TcpSender, TcpReceiver),
}
LANES = "lanes"
"""The NCCL link, started as the product starts it, over `rendezvous_backend`."""
BROKEN = ("hasty", "eager")
