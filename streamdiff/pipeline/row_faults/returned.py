"""Rank 0's side of row faults: retries rows that came back as NaN, and fails their sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from streamdiff.errors import NOT_FINITE, EngineFailure
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.row_faults.errors import Streak, at
from streamdiff.pipeline.scheduler.step import MicroStep

OnFault = Callable[[int, str], None]
"""Takes a session that has failed, and why. The session is still to be closed."""


def fail_all(session: int, reason: str) -> None:
    """The default `OnFault`, which fails all sessions. Raises EngineFailure."""
    raise EngineFailure(f"session {session} failed: {reason}")


def finite_rows(flows: Tensor) -> list[bool]:
    """Of flows `[R, ...]` in host memory, whether each row is finite throughout."""
    if math.isfinite(flows.sum().item()):  # as nearly always: what is no number leaves none in a sum
        return [True] * len(flows)
    alike: list[bool] = torch.isfinite(flows).flatten(1).all(1).tolist()
    return alike


class ReturnedRows:
    """Checks returned rows for NaN: which are run once more, and which sessions have failed (`failed_sessions`).

    Flows in host memory are checked here. On a device the head would have to wait for them: there NaN propagates
    through the session's further steps to its decoder, which waits for pictures anyway and checks (`decode_worker`).
    """

    def __init__(self) -> None:
        self.on_fault: OnFault = fail_all
        self._retrying: set[MicroStep] = set()
        self.failed_sessions: set[int] = set()
        self._streak = Streak()

    def rows_ok(self, message: StageMessage) -> list[bool]:
        """Whether each row that came back is finite; on a device True, unchecked. Mutates: self."""
        flows = message.tensors[0]
        if flows.device.type != "cpu":
            self._streak.record_success()  # as far as the head knows
            return [True] * len(message.rows)
        ok = finite_rows(flows)
        if any(ok):
            self._streak.record_success()
            self._retrying.difference_update(row for row, each in zip(message.rows, ok, strict=True) if each)
        return ok

    def should_retry(self, row: MicroStep, fault: str | None, behind: Iterable[StageMessage], kv_context: str) -> bool:
        """Whether a row that came back as NaN is run once more, alone: if no stage posted an error (`fault`), as it has
        retried by itself then; if this is the first time; and if no message of its session `behind` it may have read
        what it wrote or written what it reads. Mutates: self."""
        if fault is not None or row in self._retrying or any(_follows(row, each, kv_context) for each in behind):
            self._retrying.discard(row)
            return False
        self._retrying.add(row)
        return True

    def fail_session(self, session: int, row: MicroStep, fault: str | None) -> None:
        """Add a session to `failed_sessions`, and report it to `on_fault`; `fault` is why, None: NaN. Mutates: self.

        Raises:
            EngineFailure: too many sessions fail in a row, see `Streak`.
        """
        if session in self.failed_sessions:
            return
        self.failed_sessions.add(session)
        reason = fault or f"{at(row)}: what the model computes for it are {NOT_FINITE}"
        self._streak.record_failure(reason)
        self.on_fault(session, reason)

    def forget(self, session: int) -> None:
        """Remove a session from `failed_sessions`: its slot has another stream, or none. Mutates: self."""
        self.failed_sessions.discard(session)


def _follows(row: MicroStep, message: StageMessage, kv_context: str) -> bool:
    """Whether a message that entered after `row` concerns its session; in `same_step` steps have caches of their own,
    and only the same step, counted from the last, matters."""
    if message.update is not None:
        return message.update.session == row.session
    theirs = [each for each in message.rows if each.session == row.session]
    if kv_context == "same_step":
        theirs = [each for each in theirs if each.steps - each.step == row.steps - row.step]
    return bool(theirs)
