"""A stage's side of row faults: an error of one session leaves the rows of others unchanged.

Rows that cannot be run come out as NaN, of the shape that they would have, and so they travel on: NaN stays NaN through
every later stage, in rows and caches of that session alone, and needs no field in a message, also where a record has
gone ahead of its tensors. The reason is posted in the stage's exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from streamdiff.pipeline.distributed.message import MessageKind, StageMessage
from streamdiff.pipeline.row_faults.errors import ROW_ERRORS, at, check_own, describe, fault_key
from streamdiff.pipeline.scheduler.step import MicroStep

if TYPE_CHECKING:
    from streamdiff.pipeline.runner.graphs import Tensors
    from streamdiff.pipeline.runner.model_runner import ModelRunner


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
            if kind is MessageKind.SAVE:  # the head waits for it
                self._stage.saving.refuse(update, why)
            return message
        try:
            return replace(message, update=self._stage.apply_update(kind, update, message.tensors))
        except ROW_ERRORS as error:
            check_own(error)
            if self._stage.group is not None or kind in (MessageKind.SAVE, MessageKind.CLOSE):
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
