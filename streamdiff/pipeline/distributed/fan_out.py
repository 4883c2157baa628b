"""Forwards the head's messages to the other ranks of its stage, where several share it (`context_parallel`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import StageMessage


class FanOutReceiver:
    """A `Receiver` that also sends its messages to `others`, before this rank executes them together with those."""

    def __init__(self, receiver: Receiver, others: Sequence[Sender]) -> None:
        self._receiver, self._others = receiver, others

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        message = self._receiver.receive(wait_s)
        for part in message.as_sent if message is not None else ():
            for other in self._others:
                other.send(part)
        return message

    def notify(self, call: Callable[[], None]) -> None:
        self._receiver.notify(call)

    def close(self, limit_s: float = 0.0) -> None:
        self._receiver.close(limit_s)


class FanOutSender:
    """The head's `sender`, with readiness and end joined with those of the senders to the `others` of its stage."""

    def __init__(self, sender: Sender, others: Sequence[Sender]) -> None:
        self._sender, self.others = sender, others

    @property
    def ready(self) -> bool:
        return self._sender.ready and all(other.ready for other in self.others)

    def announce(self, message: StageMessage) -> None:
        self._sender.announce(message)

    def send(self, message: StageMessage) -> None:
        self._sender.send(message)

    def close(self) -> None:
        for each in (self._sender, *self.others):
            each.close()

    def flush(self, limit_s: float) -> None:
        for each in (self._sender, *self.others):
            each.flush(limit_s)
