"""Links within a process: from a stage to itself, or between threads in tests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from streamdiff.pipeline.distributed.link import SLOTS, LinkClosed, check_order
from streamdiff.pipeline.distributed.message import MessageLayout, StageMessage


class NoSender:
    """A `Sender` that drops messages, for a rank whose result another rank sends."""

    ready = True

    def announce(self, message: StageMessage) -> None:
        """Does nothing."""

    def send(self, message: StageMessage) -> None:
        """Drops the message."""

    def close(self) -> None:
        """Does nothing."""

    def flush(self, limit_s: float) -> None:
        """Nothing travels."""


class NoLink(NoSender):
    """The ring of one stage: what is sent is what is received, the same tensors."""

    def __init__(self) -> None:
        self._messages: deque[StageMessage] = deque()

    def send(self, message: StageMessage) -> None:
        self._messages.append(message)

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        return self._messages.popleft() if self._messages else None

    def notify(self, call: Callable[[], None]) -> None:
        """Does nothing: the caller itself sends."""

    def close(self, limit_s: float = 0.0) -> None:
        self._messages.clear()


class LocalLink:
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

    def announce(self, message: StageMessage) -> None:
        """Nothing: the record goes with the tensors."""

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
        sequence, message = self.layout.read(record, self._buffers[self._reading])
        check_order(sequence, self._received)
        self._received += 1
        return message

    def notify(self, call: Callable[[], None]) -> None:
        self._call = call

    def close(self, limit_s: float = 0.0) -> None:
        with self._changed:
            self._closed = True
            self._tell()

    def flush(self, limit_s: float) -> None:
        """What was sent lies in the slots already."""

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
