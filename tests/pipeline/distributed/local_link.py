"""A link within a process with the slots and buffers of those between processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from streamdiff.pipeline.distributed.link import SLOTS, LinkClosed, NoLink, check_order
from streamdiff.pipeline.distributed.message import MessageLayout, StageMessage


class LocalLink(NoLink):
    """Both ends in one process, over real buffers: deterministic in one thread, usable between two."""

    def __init__(self, layout: MessageLayout, *, patience_s: float = 60.0) -> None:
        """`patience_s`: how long `send` waits for a free slot before it says that nobody receives."""
        self.layout, self.patience_s = layout, patience_s
        self._buffers = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self._free = deque(range(SLOTS))
        self._full: deque[tuple[list[int], int]] = deque()
        self._reading: int | None = None
        self._closed = False
        self._sent = self._received = 0
        self._changed = threading.Condition()
        self._call: Callable[[], None] | None = None

    @property
    def ready(self) -> bool:
        return bool(self._free) or self._closed

    def send(self, message: StageMessage) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, self.patience_s):
                raise RuntimeError(f"a local link waited {self.patience_s:g} s for a free slot; nobody receives")
            if self._closed:
                raise LinkClosed("the link is closed")
            slot = self._free.popleft()
        self.layout.write(message, self._buffers[slot])
        with self._changed:
            self._full.append((self.layout.record(message, self._sent), slot))
            self._sent += 1
            self._tell()

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        with self._changed:
            self._release()
            self._changed.wait_for(lambda: self._full or self._closed, wait_s)
            if self._closed and not self._full:
                raise LinkClosed("the link is closed")
            if not self._full:
                return None
            record, self._reading = self._full.popleft()
        sequence, *message = self.layout.parse(record)
        check_order(sequence, self._received)
        self._received += 1
        return self.layout.attach(StageMessage(*message), self._buffers[self._reading])

    def notify(self, call: Callable[[], None]) -> None:
        self._call = call

    def close(self, limit_s: float = 0.0) -> None:
        with self._changed:
            self._closed = True
            self._tell()

    def _tell(self) -> None:
        """Wake waiting threads, and call what `notify` was given. Needs the lock."""
        self._changed.notify_all()
        if self._call is not None:
            self._call()

    def _release(self) -> None:
        if self._reading is not None:
            self._free.append(self._reading)
            self._reading = None
            self._changed.notify_all()
