"""The loop of every rank: take work, run it through the stage, pass it on.

The head's work comes from its scheduler, everybody else's from the link before it; nothing else is different.
"""

from __future__ import annotations

from dataclasses import replace

from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, StageMessage
from streamdiff.pipeline.runner.model_runner import ModelRunner

LEAVE_S = 5.0
"""How long ranks wait for each other when they end."""


class Worker:
    """One rank.

    `now` is what it hands to the device and `last` what it had handed over before: who has to say where an error
    happened reads them, from any thread. `done` counts works.
    """

    def __init__(
        self, receiver: Receiver, stage: ModelRunner, sender: Sender, timer: DeviceTimer | None = None
    ) -> None:
        """`timer` is that of the device; None: one that is made here."""
        self.receiver, self.stage, self.sender = receiver, stage, sender
        self.timer = timer or DeviceTimer.on(stage.device)
        self._timed = self.timer.stream()
        self.now: StageMessage | None = None
        self.last: StageMessage | None = None
        self.done = 0

    def turn(self, wait_s: float | None = 0.0) -> StageMessage | None:
        """Take one work, carry it out, hand the result on; returns what was taken."""
        work = self.receiver.receive(wait_s)
        if work is not None:
            self.now = work
            with self._timed.work(replace(work, tensors=())):
                result = self.stage.carry_out(work)
            self.done += 1
            self.now, self.last = None, work
            self.sender.send(result)
        return work

    def run(self) -> None:
        """Work until the ring is stopped, then take leave of the neighbours. Mutates: everything."""
        while (work := self.turn(None)) is None or work.kind is not MessageKind.STOP:
            pass
        self.sender.close()
        self.receiver.close(LEAVE_S)
        self.sender.flush(LEAVE_S)

    def where(self) -> str:
        """What it is at, for messages."""
        if self.now is not None:
            return f"at {self.now}"
        return f"after {self.last}" if self.last is not None else "before its first work"
