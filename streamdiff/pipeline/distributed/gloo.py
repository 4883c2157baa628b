"""The gloo link: real processes on any machine. CUDA tensors are staged through host memory.

A message is one packed buffer, the record first. Each end has a thread that waits for gloo, since gloo tells that an
operation is done only to who waits for it.

gloo cannot take back a posted receive, and a process that ends with one is aborted. So whoever closes an edge sends as
many last messages as receives are posted at the other end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from streamdiff.pipeline.distributed.link import SLOTS, LinkClosed, check_order
from streamdiff.pipeline.distributed.message import MessageLayout, StageMessage

_END = -1
"""Kind of a last message."""


class _Slots:
    """Packed buffers `[record | tensors]` of one end of an edge; `tag` tells edges between the same two ranks apart."""

    def __init__(self, layout: MessageLayout, peer: int, tag: int, group: dist.ProcessGroup | None) -> None:
        self.layout, self.peer, self.tag, self.group = layout, peer, tag, group
        self.head = 8 * layout.record_length
        self.buffers = [torch.zeros(self.head + layout.nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self.error: BaseException | None = None

    def record(self, slot: int) -> Tensor:
        return self.buffers[slot][: self.head].view(torch.int64)

    def tensors(self, slot: int) -> Tensor:
        return self.buffers[slot][self.head :]

    def send(self, slot: int) -> None:
        """Send a slot and wait until it may be written again.

        Raises:
            RuntimeError: the peer is gone.
        """
        sending = dist.isend(self.buffers[slot], self.peer, group=self.group, tag=self.tag)
        assert sending is not None
        sending.wait()

    def closed(self) -> LinkClosed:
        """The error to raise, with what ended the link."""
        message = f"the link with rank {self.peer} is closed"
        return LinkClosed(f"{message}: {self.error}" if self.error else message, self.peer)


class GlooSender:
    """The sending end of an edge to rank `peer`."""

    def __init__(self, layout: MessageLayout, peer: int, tag: int, group: dist.ProcessGroup | None = None) -> None:
        self._slots = _Slots(layout, peer, tag, group)
        self._free: SimpleQueue[int | None] = SimpleQueue()
        self._full: SimpleQueue[int | None] = SimpleQueue()
        for slot in range(SLOTS):
            self._free.put(slot)
        self._sent = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"send-to-{peer}", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._closed or not self._free.empty()

    @property
    def broken(self) -> bool:
        """Whether the other end is known to be gone."""
        return self._slots.error is not None

    def send(self, work: StageMessage) -> None:
        slot = None if self._closed else self._free.get()
        if slot is None:
            self._closed = True
            raise self._slots.closed()
        slots = self._slots
        slots.record(slot).copy_(torch.tensor(slots.layout.record(work, self._sent)))
        slots.layout.write(work, slots.tensors(slot))
        self._sent += 1
        self._full.put(slot)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._full.put(None)

    def flush(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def _run(self) -> None:
        slots = self._slots
        try:
            while (slot := self._full.get()) is not None:
                slots.send(slot)
                self._free.put(slot)
            for slot in range(SLOTS):  # nothing is on its way any more
                slots.record(slot)[0] = _END
                slots.send(slot)
        except RuntimeError as error:  # the peer is gone: whoever sends next is told
            slots.error = error
            self._free.put(None)


class GlooReceiver:
    """The receiving end of an edge from rank `peer`. Both slots have a receive posted before anything is sent."""

    def __init__(
        self, layout: MessageLayout, peer: int, tag: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._slots = _Slots(layout, peer, tag, group)
        self._device = device
        self._posted: SimpleQueue[tuple[int, dist.Work]] = SimpleQueue()
        self._arrived: SimpleQueue[int | None] = SimpleQueue()
        self._reading: int | None = None
        self._received = 0
        self._closed = False
        self._call: Callable[[], None] | None = None
        for slot in range(SLOTS):
            self._post(slot)
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{peer}", daemon=True)
        self._thread.start()

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        if self._closed:
            raise self._slots.closed()
        self._release()
        try:
            slot = self._arrived.get_nowait() if wait_s == 0.0 else self._arrived.get(timeout=wait_s)
        except Empty:
            return None
        if slot is None:
            self._closed = True
            raise self._slots.closed()
        self._reading = slot
        sequence, work = self._slots.layout.read(self._slots.record(slot).tolist(), self._slots.tensors(slot))
        check_order(sequence, self._received)
        self._received += 1
        if self._device.type == "cpu":
            return work
        return replace(work, tensors=tuple(tensor.to(self._device) for tensor in work.tensors))

    def notify(self, call: Callable[[], None]) -> None:
        self._call = call

    def close(self, limit_s: float = 0.0) -> None:
        self._closed = True
        if self._slots.error is None:
            with contextlib.suppress(LinkClosed):  # then nothing is posted any more
                self._release()
            self._thread.join(limit_s)

    def _release(self) -> None:
        """Post the next receive into the slot that was read. Mutates: self."""
        if self._reading is not None:
            slot, self._reading = self._reading, None
            try:
                self._post(slot)
            except RuntimeError as error:
                self._slots.error = error
                self._closed = True
                raise self._slots.closed() from error

    def _post(self, slot: int) -> None:
        slots = self._slots
        posted = dist.irecv(slots.buffers[slot], slots.peer, group=slots.group, tag=slots.tag)
        assert posted is not None
        self._posted.put((slot, posted))

    def _run(self) -> None:
        """Hand on what comes, until all last messages have come."""
        ends = 0
        while ends < SLOTS:
            slot, posted = self._posted.get()
            try:
                posted.wait()
            except RuntimeError as error:  # the peer is gone: whoever receives next is told
                self._slots.error = error
                self._hand_on(None)
                return
            if int(self._slots.record(slot)[0]) == _END:
                ends += 1
                if ends == 1:
                    self._hand_on(None)
            else:
                self._hand_on(slot)

    def _hand_on(self, slot: int | None) -> None:
        self._arrived.put(slot)
        if self._call is not None:
            self._call()
