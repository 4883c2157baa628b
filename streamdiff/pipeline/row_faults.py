"""Faults of rows: an error of one session leaves the others unchanged.

Rows that a stage cannot run come out as NaN, of the shape that they would have, and so they travel on: NaN stays NaN
through every later stage, in rows and caches of that session alone, and needs no field in a message, also where a
record has gone ahead of its tensors. The reason is posted in the stage's exchange. Rank 0 retries rows that come back
as NaN, and fails their sessions. Errors that cannot be one session's own end the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import DistError

from streamdiff.core import MicroStep
from streamdiff.errors import EngineFailure
from streamdiff.pipeline.distributed.message import MessageKind, StageMessage

if TYPE_CHECKING:
    from streamdiff.pipeline.runner.graphs import Tensors
    from streamdiff.pipeline.runner.model_runner import ModelRunner

ROW_ERRORS = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, ValueError)
"""What a session's text, cache or numbers can raise, and memory that is short. Others are faults of the program, or of
the ring (`LinkClosed`)."""
_NOT_OWN = (EngineFailure, DistError, torch.AcceleratorError)
"""Those among them that would strike the next session too: a device that is gone, ranks that cannot exchange."""


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


# ---- rank 0 --------------------------------------------------------------------------------------------------------

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

    def fail_session(self, session: int, reason: str, streak: Streak | None = None) -> None:
        """Add a session to `failed_sessions`, and report it to `on_fault`. `streak` counts it; None: that of forwards.
        Mutates: self, streak.

        Raises:
            EngineFailure: too many sessions fail in a row, see `Streak`.
        """
        if session not in self.failed_sessions:
            self.failed_sessions.add(session)
            (streak or self._streak).record_failure(reason)
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


# ---- a stage -------------------------------------------------------------------------------------------------------


class StageGuard:
    """Has a stage carry out messages. `broken`: the sessions that it cannot run any more, and why."""

    def __init__(self, stage: ModelRunner) -> None:
        self._stage = stage
        self.broken: dict[int, str] = {}

    def forward(self, rows: Sequence[MicroStep], given: Tensors, failed: Exception | None = None) -> Tensors:
        """Run those of `rows` whose sessions are not broken, where some are, or where running all of them together has
        `failed`. If they fail together, each session's by themselves, once: those that fail again are NaN, and
        their session is broken. Mutates: self, the stage.

        Raises:
            Exception: one that is no session's own: of a kind that cannot be, of all of several sessions, or of a stage
                whose forwards cannot be run again.
        """
        runnable = [index for index, row in enumerate(rows) if row.session not in self.broken]
        parts: list[tuple[list[int], Tensors]] = []
        if failed is None and runnable:
            try:
                part = self._stage.forward([rows[index] for index in runnable], _of(given, runnable, len(rows)))
                parts = [(runnable, part)]
            except ROW_ERRORS as error:
                failed = error
        if failed is not None:
            check_own(failed)
            # What one rank of a shared stage leaves out would stop the others.
            if self._stage.group is not None or not self._stage.spec.repeats:
                raise failed
            parts = self._each_session(rows, given, runnable)
        return self._put_together(rows, given, parts)

    def apply_update(self, message: StageMessage) -> StageMessage:
        """Make a change to a session, which is broken if that fails. Of a broken one nothing is done but to close it.
        Returns the message for the next rank. Mutates: self, the stage.

        Raises:
            Exception: one that is no session's own.
        """
        update, kind = message.update, message.kind
        assert update is not None, "rows go to `forward`"
        if kind in (MessageKind.OPEN, MessageKind.CLOSE):
            self.broken.pop(update.session, None)
        if (why := self.broken.get(update.session)) is not None:
            if kind is MessageKind.COPY_OUT and update.saved:  # the head waits for it
                self._stage.mover.refuse(update, why)
            return message
        try:
            return replace(message, update=self._stage.apply_update(kind, update, message.tensors))
        except ROW_ERRORS as error:
            check_own(error)
            if (
                self._stage.group is not None
                or kind is MessageKind.CLOSE
                or (kind is MessageKind.COPY_OUT and update.saved)
            ):
                raise
            self.broken[update.session] = describe(error, f"{kind.name.lower()} failed on stage {self._stage.index}")
        return message

    def _each_session(
        self, rows: Sequence[MicroStep], given: Tensors, runnable: Sequence[int]
    ) -> list[tuple[list[int], Tensors]]:
        """Run each session's rows by themselves; those that may depend on each other stay together. From the same
        inputs everything that is written is written again, to the same values. Mutates: self, the stage."""
        parts: list[tuple[list[int], Tensors]] = []
        sessions = list(dict.fromkeys(rows[index].session for index in runnable))
        for session in sessions:
            own = [index for index in runnable if rows[index].session == session]
            self._stage.forget_sinks(session)  # one may be half done
            try:
                part = self._stage.forward([rows[index] for index in own], _of(given, own, len(rows)))
            except ROW_ERRORS as error:
                check_own(error)
                where = f"{at(rows[own[0]])} failed on stage {self._stage.index}, also alone"
                self.broken[session] = describe(error, where)
                if len(sessions) > 1 and all(each in self.broken for each in sessions):
                    raise
            else:
                parts.append((own, tuple(tensor.clone() for tensor in part)))  # the next one may write there
        return parts

    def _put_together(
        self, rows: Sequence[MicroStep], given: Tensors, parts: Sequence[tuple[list[int], Tensors]]
    ) -> Tensors:
        """The result for all rows; those that are in no part are NaN, and the reason is posted."""
        whole = self._stage.nan_outputs(len(rows), given)
        for indices, part in parts:
            for place, index in enumerate(indices):
                for there, own in zip(whole, part, strict=True):
                    there[index].copy_(own[place])
        done = {index for indices, _ in parts for index in indices}
        for session, epoch in {(row.session, row.epoch) for index, row in enumerate(rows) if index not in done}:
            self._stage.exchange.post_text(fault_key(session, epoch), self.broken[session])
        return whole


def _of(given: Tensors, indices: Sequence[int], rows: int) -> Tensors:
    """The inputs of some of so many rows, in order."""
    if len(indices) == rows:
        return given
    return tuple(torch.stack([tensor[index] for index in indices]) for tensor in given)
