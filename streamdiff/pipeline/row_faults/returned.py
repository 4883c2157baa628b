"""The head's side: rows that came back without numbers, and sessions that end for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from streamdiff.errors import EngineFailure
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.row_faults.errors import Streak, at
from streamdiff.pipeline.scheduler.step import MicroStep

OnFault = Callable[[int, str], None]
"""Takes a session that has failed, and why. The session is still to be closed."""


def fail_all(session: int, reason: str) -> None:
    """For a ring whose sessions nobody ends one by one. Raises EngineFailure."""
    raise EngineFailure(f"session {session} failed: {reason}")


def finite_rows(flows: Tensor) -> list[bool]:
    """Of flows `[R, ...]` in host memory, which rows are numbers throughout."""
    if math.isfinite(flows.sum().item()):  # as nearly always: what is no number leaves none in a sum
        return [True] * len(flows)
    alike: list[bool] = torch.isfinite(flows).flatten(1).all(1).tolist()
    return alike


class ReturnedRows:
    """Which rows have failed, which are tried once more, and which sessions are `lost`.

    Numbers are looked at where they lie in host memory. On a device the head never waits for them: there NaN goes on
    through the session's further steps to its decoder, which waits for pictures anyway and looks (`decode_worker`).
    """

    def __init__(self) -> None:
        self.on_fault: OnFault = fail_all
        self._again: set[MicroStep] = set()
        self.lost: set[int] = set()
        self._streak = Streak()

    def fates(self, message: StageMessage) -> list[bool]:
        """Of each row that came back whether it is well. Mutates: self."""
        flows = message.tensors[0]
        if flows.device.type != "cpu":
            self._streak.well()  # as far as the head knows
            return [True] * len(message.rows)
        fates = finite_rows(flows)
        if any(fates):
            self._streak.well()
            self._again.difference_update(row for row, well in zip(message.rows, fates, strict=True) if well)
        return fates

    def may_try(self, row: MicroStep, word: str | None, behind: Iterable[StageMessage], kv_context: str) -> bool:
        """Whether a row that came back without numbers is tried once more, alone: where no stage left `word` of an
        error, as it has tried that itself, where this is not the second time, and nothing of its session, `behind` it,
        may have read what it left or written what it reads. Mutates: self."""
        if word is not None or row in self._again or any(_follows(row, each, kv_context) for each in behind):
            self._again.discard(row)
            return False
        self._again.add(row)
        return True

    def lose(self, session: int, row: MicroStep, word: str | None) -> None:
        """A session has failed. Mutates: self.

        Raises:
            EngineFailure: one after the other does.
        """
        if session in self.lost:
            return
        self.lost.add(session)
        reason = word or f"{at(row)}: what the model computes for it are no numbers (NaN or infinite)"
        self._streak.lost(reason)
        self.on_fault(session, reason)

    def forget(self, session: int) -> None:
        """The slot has another stream, or none. Mutates: self."""
        self.lost.discard(session)


def _follows(row: MicroStep, message: StageMessage, kv_context: str) -> bool:
    """Whether a message that entered after `row` concerns its session; in `matched` steps have caches of their own, and
    only the same step, counted from the last, matters."""
    if message.update is not None:
        return message.update.session == row.session
    theirs = [each for each in message.rows if each.session == row.session]
    if kv_context == "matched":
        theirs = [each for each in theirs if each.steps - each.step == row.steps - row.step]
    return bool(theirs)
