"""The loop of every rank: take work, run it through the stage, pass it on.

The head's work comes from its scheduler, everybody else's from the link before it; nothing else is different.
"""

from __future__ import annotations

from typing import Protocol

from streamdiff.pipeline.links import Inbox, Outbox
from streamdiff.pipeline.stage import Stage
from streamdiff.pipeline.work import Kind, Work


class Source(Protocol):
    """Where a rank's work comes from."""

    def take(self, wait_s: float | None = 0.0) -> Work | None:
        """The next work, or None when there is none within `wait_s` (None: wait for ever)."""


class LinkSource:
    """Work from the stage before."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox

    def take(self, wait_s: float | None = 0.0) -> Work | None:
        return self.inbox.receive(wait_s)


class Worker:
    """One rank. `now` is what it works on, for whoever has to say where an error happened."""

    def __init__(self, source: Source, stage: Stage, outbox: Outbox) -> None:
        self.source, self.stage, self.outbox = source, stage, outbox
        self.now: Work | None = None

    def turn(self, wait_s: float | None = 0.0) -> Work | None:
        """Take one work, carry it out, hand the result on; returns what was taken."""
        work = self.source.take(wait_s)
        if work is not None:
            self.now = work
            self.outbox.send(self.stage.carry_out(work))
            self.now = None
        return work

    def run(self) -> None:
        """Work until the ring is stopped. Mutates: everything."""
        while (work := self.turn(None)) is None or work.kind is not Kind.STOP:
            pass
