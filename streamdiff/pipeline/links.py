"""Links: one-way channels from a stage to the next one in the ring, behind one protocol.

A link has two slots. `send` copies a work into a free slot and returns while it travels; with both slots on their way
it waits, which is the back-pressure. What `receive` returns lies in a slot of the receiving side and stays untouched
until the next `receive`. Buffers being sent are never written: `tests/pipeline/test_links.py` has links that delay and
links that scribble over every slot that is declared free.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch

from streamdiff.pipeline.work import Wire, Work

SLOTS = 2


class LinkClosed(Exception):
    """The other side closed the link, or it was aborted; nothing more comes."""


class Outbox(Protocol):
    """The sending end, for one thread."""

    @property
    def ready(self) -> bool:
        """Whether `send` would return at once."""

    def send(self, work: Work) -> None:
        """Copy `work` and start to send it; its tensors may be written again afterwards.

        Raises:
            LinkClosed: the link was closed or its other end is gone.
        """

    def close(self) -> None:
        """Nothing more will be sent. What was sent still arrives."""

    def abort(self) -> None:
        """Drop everything; whoever waits on either end gets `LinkClosed`."""


class Inbox(Protocol):
    """The receiving end, for one thread."""

    def receive(self, wait_s: float | None = 0.0) -> Work | None:
        """The next work in order, or None when none came within `wait_s` (None: wait for ever).

        Its tensors are views that stay as they are until the next call.

        Raises:
            LinkClosed: the link was closed and everything sent before has been received.
        """

    def close(self) -> None:
        """Nothing more is wanted."""


class NoLink:
    """The ring of one stage: what is sent is what is received, the same tensors."""

    ready = True

    def __init__(self) -> None:
        self._works: deque[Work] = deque()

    def send(self, work: Work) -> None:
        self._works.append(work)

    def receive(self, wait_s: float | None = 0.0) -> Work | None:
        return self._works.popleft() if self._works else None

    def close(self) -> None:
        self._works.clear()

    def abort(self) -> None:
        self._works.clear()


class LocalLink:
    """Both ends in one process, over real buffers: deterministic in one thread, usable between two."""

    def __init__(self, wire: Wire, *, patience_s: float = 60.0) -> None:
        """`patience_s`: how long `send` waits for a free slot before it says that nobody receives."""
        self.wire, self.patience_s = wire, patience_s
        self._buffers = [torch.empty(wire.nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self._free = deque(range(SLOTS))
        self._full: deque[tuple[list[int], int]] = deque()
        self._reading: int | None = None
        self._closed = self._aborted = False
        self._sent = self._received = 0
        self._changed = threading.Condition()

    @property
    def ready(self) -> bool:
        return bool(self._free) or self._closed

    def send(self, work: Work) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, self.patience_s):
                raise RuntimeError(f"a local link waited {self.patience_s:g} s for a free slot; nobody receives")
            if self._closed:
                raise LinkClosed("the link is closed")
            slot = self._free.popleft()
        self.wire.write(work, self._buffers[slot])
        with self._changed:
            self._full.append((self.wire.record(work, self._sent), slot))
            self._sent += 1
            self._changed.notify_all()

    def receive(self, wait_s: float | None = 0.0) -> Work | None:
        with self._changed:
            self._release()
            self._changed.wait_for(lambda: self._full or self._closed, wait_s)
            if self._aborted or (self._closed and not self._full):
                raise LinkClosed("the link is closed")
            if not self._full:
                return None
            record, self._reading = self._full.popleft()
        sequence, work = self.wire.read(record, self._buffers[self._reading])
        check_order(sequence, self._received)
        self._received += 1
        return work

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abort(self) -> None:
        with self._changed:
            self._closed = self._aborted = True
            self._full.clear()
            self._changed.notify_all()

    def _release(self) -> None:
        if self._reading is not None:
            self._free.append(self._reading)
            self._reading = None
            self._changed.notify_all()


def check_order(sequence: int, expected: int) -> None:
    """A link that loses, repeats or reorders messages is broken beyond repair."""
    if sequence != expected:
        raise RuntimeError(f"a link brought message {sequence} where {expected} was next")
