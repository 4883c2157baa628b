"""The loop of every rank: receive a message, run it through the stage, send the result on.

Rank 0 executes what its scheduler hands out, every other rank what the link before it brings; nothing else is
different.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from streamdiff.pipeline.device_timer import DeviceTimer, StreamTimer
from streamdiff.pipeline.distributed.heartbeat import RankLoop
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, StageMessage
from streamdiff.pipeline.runner.model_runner import ModelRunner

LEAVE_S = 5.0
"""How long ranks wait for each other when they end."""


class Worker(RankLoop):
    """The loop of a rank that has a stage."""

    def __init__(
        self,
        receiver: Receiver,
        stage: ModelRunner,
        sender: Sender,
        timer: DeviceTimer | None = None,
        timed: StreamTimer | None = None,
    ) -> None:
        """`timer` is that of the device, `timed` that of the stream that the stage computes on; None: made here."""
        super().__init__(receiver, sender, timer or DeviceTimer.on(stage.device))
        self.stage, self._timed = stage, timed or self.timer.stream()
        self._received_rows: list[StageMessage] = []  # rows of a long forward, until all are received
        self._rest: deque[StageMessage] = deque()  # those that are still to be sent on

    @property
    def awaits_others(self) -> bool:
        return self.stage.heads < self.stage.denoiser.heads

    @property
    def sending(self) -> bool:
        """Whether rows of a long forward are still to be sent: `step` does nothing else before they are."""
        return bool(self._rest)

    def step(self, wait_s: float | None = 0.0) -> StageMessage | None:
        """Receive one message, execute it, send the result on; returns the message, or None if there was none.

        A link carries few rows at once. A forward with more of them (`MicroStep.recaches`) travels row by row, which
        are executed together when all have come; of its result, which nobody needs, the last stage sends one."""
        if self._rest:
            self.sender.send(self._rest.popleft())
            return None
        message = self.receiver.receive(wait_s)
        if message is not None:
            self.execute(message)
        return message

    def execute(self, message: StageMessage) -> None:
        """Execute a message, and send the result on, of a long forward the first row. Mutates: self, the stage."""
        self.done += 1
        if (whole := self._assembled(message)) is not None:
            self.now = whole
            if not (whole.is_long or whole.kind.is_answered):  # whose record tells what became of it
                self.sender.announce(whole)
            with self._timed.work(whole.bare):
                result = self.stage.carry_out(whole)
            self.now, self.last = None, whole
            last = self.stage.index == self.stage.stages - 1
            first, *rest = result.as_sent[-1:] if last else result.as_sent
            self._rest.extend(rest)
            self.sender.send(first)

    def _assembled(self, message: StageMessage) -> StageMessage | None:
        """The complete message that `message` is or completes; None while rows of it are missing. Mutates: self."""
        rows = message.rows
        if not message.is_long or len(rows) > 1:
            return message
        # The link's buffers are written again before the last row has come.
        self._received_rows.append(replace(message, tensors=tuple(tensor.clone() for tensor in message.tensors)))
        if rows[-1].chunk != rows[-1].recache_end:
            return None
        received, self._received_rows = self._received_rows, []
        tensors = tuple(torch.cat(parts) for parts in zip(*(each.tensors for each in received), strict=True))
        return replace(message, rows=tuple(row for each in received for row in each.rows), tensors=tensors)

    def run(self) -> None:
        while (message := self.step(None)) is None or message.kind is not MessageKind.STOP:
            pass
        self.close_links(LEAVE_S)

    def where(self) -> str:
        if self.now is not None:
            return f"at {self.now}"
        return f"after {self.last}" if self.last is not None else "before its first message"
