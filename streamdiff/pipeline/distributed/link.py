"""Links: one-way channels from a stage to the next one in the ring, behind one protocol.

A link has two slots. `send` copies a message into a free slot and returns while it travels; with both slots in transit
it waits, which is the back-pressure. What `receive` returns lies in a slot of the receiving side and stays untouched
until the next `receive`. Buffers being sent are never written: `tests/pipeline/distributed/test_link.py` has links that
delay and links that scribble over every slot that is declared free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from streamdiff.pipeline.distributed.message import StageMessage

SLOTS = 2


class LinkClosed(Exception):
    """The other side (rank `peer`, where there are ranks) closed the link or is gone; nothing more comes."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class GroupBroken(LinkClosed):
    """An exchange among several ranks ended: one of the other ones, `peers`, is gone."""

    def __init__(self, message: str, peers: tuple[int, ...]) -> None:
        super().__init__(message)
        self.peers = peers


def ring_edges(stages: int, shares: int = 1) -> list[tuple[int, int]]:
    """Sending and receiving rank of every edge, by its number: from stage to stage, where `shares` ranks share each as
    many edges side by side; back to the head; and from the head to the other ranks of its stage."""
    last = (stages - 1) * shares
    forward = [(rank, rank + shares) for rank in range(last)]
    back = [(last, 0)] if stages > 1 else []
    return [*forward, *back, *((0, rank) for rank in range(1, shares))]


class Sender:
    """The sending end, for one thread. This one drops messages, for a rank whose result another rank sends."""

    @property
    def ready(self) -> bool:
        """Whether `send` would return at once."""
        return True

    def announce(self, message: StageMessage) -> None:
        """Announce the next `send`, which will have the record of `message` and other tensors, which may not be
        computed yet. A link whose records go ahead of the tensors sends the record now.

        Raises:
            LinkClosed: the link was closed or its other end is gone.
        """

    def send(self, message: StageMessage) -> None:
        """Copy `message` and start to send it; its tensors may be written again afterwards.

        Raises:
            LinkClosed: the link was closed or its other end is gone.
        """

    def close(self, limit_s: float = 0.0) -> None:
        """Nothing more will be sent. What was sent still arrives. Does not wait."""

    def flush(self, limit_s: float) -> None:
        """After `close`: wait until all has been sent, at most so long."""


class Receiver(Protocol):
    """The receiving end, for one thread."""

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        """The next message in order, or None when none came within `wait_s` (None: wait for ever).

        Its tensors are views that stay as they are until the next call.

        Raises:
            LinkClosed: the link was closed and everything sent before has been received.
        """

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, whenever something comes or the link ends."""

    def close(self, limit_s: float = 0.0) -> None:
        """Nothing more is wanted; waits up to `limit_s` for the other end to close too."""


def check_order(sequence: int, expected: int) -> None:
    """A link that loses, repeats or reorders messages is broken beyond repair."""
    if sequence != expected:
        raise RuntimeError(f"a link brought message {sequence} where {expected} was next")


class NoLink(Sender):
    """Both ends in one thread, from a stage to itself or to another: what is sent is what is received, the same
    tensors."""

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
