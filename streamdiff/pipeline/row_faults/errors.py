"""Which errors may be one session's own, and how they are told."""

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


def fault_name(session: int, epoch: int) -> str:
    """The name under which a stage leaves word of why it cannot run the rows of a session's epoch. Epochs of a slot are
    never used twice, so it is never taken for another stream's."""
    return f"fault of {session} in epoch {epoch}"


def describe(error: BaseException, where: str) -> str:
    """A reason, for people."""
    return f"{where}: {type(error).__name__}: {str(error).strip()}"


def at(row: MicroStep) -> str:
    """Where a session is, without its number."""
    return f"chunk {row.chunk}, step {row.step}"


MOST_IN_A_ROW = 2
"""Sessions that may fail with nothing well between: two have their faults at the same time now and then."""


class Streak:
    """Counts session failures in a row: more than MOST_IN_A_ROW, with no success between, are taken for the engine's
    fault."""

    def __init__(self) -> None:
        self._lost = 0

    def well(self) -> None:
        """Something ran as it should. Mutates: self."""
        self._lost = 0

    def lost(self, reason: str) -> None:
        """A session has failed. Mutates: self.

        Raises:
            EngineFailure: so did MOST_IN_A_ROW before it, and nothing was well since.
        """
        self._lost += 1
        if self._lost > MOST_IN_A_ROW:
            raise EngineFailure(
                f"one session after the other fails, so it is not a session's fault; the last: {reason}"
            )
