"""Links: one-way channels from a stage to the next one in the ring, behind one protocol.

A link has two slots. `send` copies a work into a free slot and returns while it travels; with both slots on their way
it waits, which is the back-pressure. What `receive` returns lies in a slot of the receiving side and stays untouched
until the next `receive`. Buffers being sent are never written: `tests/pipeline/links/test_link.py` has links that delay
and links that scribble over every slot that is declared free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from streamdiff.pipeline.work import Wire, Work

SLOTS = 2


class LinkClosed(Exception):
    """The other side (rank `peer`, where there are ranks) closed the link or is gone; nothing more comes."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


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
        """Nothing more will be sent. What was sent still arrives. Does not wait."""

    def flush(self, limit_s: float) -> None:
        """After `close`: wait until all has been sent, at most so long."""

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

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, whenever something comes or the link ends."""

    def close(self, limit_s: float = 0.0) -> None:
        """Nothing more is wanted; waits up to `limit_s` for the other end to close too."""


class NoLink:
    """The ring of one stage: what is sent is what is received, the same tensors."""

    ready = True

    def __init__(self) -> None:
        self._works: deque[Work] = deque()

    def send(self, work: Work) -> None:
        self._works.append(work)

    def receive(self, wait_s: float | None = 0.0) -> Work | None:
        return self._works.popleft() if self._works else None

    def notify(self, call: Callable[[], None]) -> None:
        """What comes has been sent by the caller itself."""

    def close(self, limit_s: float = 0.0) -> None:
        self._works.clear()

    def flush(self, limit_s: float) -> None:
        """Nothing travels."""

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
        self._call: Callable[[], None] | None = None

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
            self._tell()

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

    def notify(self, call: Callable[[], None]) -> None:
        self._call = call

    def close(self, limit_s: float = 0.0) -> None:
        with self._changed:
            self._closed = True
            self._tell()

    def flush(self, limit_s: float) -> None:
        """What was sent lies in the slots already."""

    def abort(self) -> None:
        with self._changed:
            self._closed = self._aborted = True
            self._full.clear()
            self._tell()

    def _tell(self) -> None:
        """Wake who waits, and who asked to be told. Needs the lock."""
        self._changed.notify_all()
        if self._call is not None:
            self._call()

    def _release(self) -> None:
        if self._reading is not None:
            self._free.append(self._reading)
            self._reading = None
            self._changed.notify_all()


def check_order(sequence: int, expected: int) -> None:
    """A link that loses, repeats or reorders messages is broken beyond repair."""
    if sequence != expected:
        raise RuntimeError(f"a link brought message {sequence} where {expected} was next")
