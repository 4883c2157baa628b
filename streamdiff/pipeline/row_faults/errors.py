"""Classifies exceptions: those confined to one session, and those that end the engine."""

from __future__ import annotations

import torch
from torch.distributed import DistError

from streamdiff.errors import EngineFailure
from streamdiff.pipeline.scheduler.step import MicroStep

ROW_ERRORS = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, ValueError)
"""What a session's text, cache or numbers can raise, and memory that is short. Others are faults of the program, or of
the ring (`LinkClosed`)."""
_NOT_OWN = (EngineFailure, DistError, torch.AcceleratorError)
"""Those among them that strike whoever comes next: a device that is gone, ranks that cannot exchange."""


def check_own(error: BaseException) -> None:
    """Raise an error that cannot be one session's own."""
    if isinstance(error, _NOT_OWN):
        raise error


def fault_key(session: int, epoch: int) -> str:
    """Exchange key of the reason, posted by a stage, why it cannot run the rows of a session's epoch. Epochs of a slot
    are never used twice, so it is never taken for another stream's."""
    return f"fault of {session} in epoch {epoch}"


def describe(error: BaseException, where: str) -> str:
    """An error as a line of text: where, type and message."""
    return f"{where}: {type(error).__name__}: {str(error).strip()}"


def at(row: MicroStep) -> str:
    """Chunk and step of a row, as text for messages."""
    return f"chunk {row.chunk}, step {row.step}"


MOST_IN_A_ROW = 2
"""Sessions that may fail without a success between them: two have their faults at the same time now and then."""


class Streak:
    """Counts session failures in a row: more than MOST_IN_A_ROW, with no success between, are taken for the engine's
    fault."""

    def __init__(self) -> None:
        self._failures = 0

    def record_success(self) -> None:
        """Count a success: the number of failures in a row is 0 again. Mutates: self."""
        self._failures = 0

    def record_failure(self, reason: str) -> None:
        """Count the failure of a session. Mutates: self.

        Raises:
            EngineFailure: it is one more than MOST_IN_A_ROW without a success between them.
        """
        self._failures += 1
        if self._failures > MOST_IN_A_ROW:
            raise EngineFailure(
                f"one session after the other fails, so it is not a session's fault; the last: {reason}"
            )
