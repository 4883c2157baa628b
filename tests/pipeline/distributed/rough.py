"""Gloo links that do their worst within what a link may do, and two that do a little more.

They change when things happen and what lies in slots that nobody may read; the loops are the product's own. What a ring
computes over the rough ones must not differ by a bit. The hasty and the eager one each leave out one ordering.
"""

from __future__ import annotations

import random
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from streamdiff.pipeline.distributed.gloo import GlooReceiver, GlooSender
from streamdiff.pipeline.distributed.message import StageMessage

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

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self.buffers = buffers

    def put(self, slot: int | None, *rest: Any) -> None:
        if slot is not None:
            self.buffers[slot].fill_(RUBBISH)
        super().put(slot, *rest)


class RoughSender(GlooSender):
    """Messages leave late; a slot holds rubbish once it is free."""

    def __init__(self, wire: Any, peer: int, tag: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(wire, peer, tag, group)
        self._pause, self._send = Pauses(tag), self._slots.send
        self._free = Scribbling(self._slots.buffers)
        for slot in range(len(self._slots.buffers)):
            self._free.put(slot)
        self._slots.send = self._send_late  # type: ignore[method-assign]

    def _send_late(self, slot: int) -> None:
        self._pause()
        self._send(slot)


class RoughReceiver(GlooReceiver):
    """Receives are posted late, into a slot that holds rubbish."""

    def __init__(self, wire: Any, peer: int, tag: int, *rest: Any) -> None:
        self._pause = Pauses(-1 - tag)
        super().__init__(wire, peer, tag, *rest)

    def _post(self, slot: int) -> None:
        self._slots.buffers[slot].fill_(RUBBISH)
        self._pause()
        super()._post(slot)


class HastySender(RoughSender):
    """Broken: does not wait until a message has left before its slot is free."""

    def _send_late(self, slot: int) -> None:
        slots = self._slots
        self.sending = [*getattr(self, "sending", []), dist.isend(slots.buffers[slot], slots.peer, tag=slots.tag)]


class EagerInbox(RoughReceiver):
    """Broken: posts the next receive before what was received has been read."""

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        work = super().receive(wait_s)
        self._release()
        return work


LINKS: dict[str, tuple[type[GlooSender], type[GlooReceiver]]] = {
    "plain": (GlooSender, GlooReceiver),
    "rough": (RoughSender, RoughReceiver),
    "hasty": (HastySender, RoughReceiver),
    "eager": (RoughSender, EagerInbox),
    "lanes": (GlooSender, GlooReceiver),
}
LANES = "lanes"
"""The NCCL link, started as the product starts it, with gloo in the place of NCCL."""
BROKEN = ("hasty", "eager")
