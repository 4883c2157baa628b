"""Rank 0's receiver: hands out session updates and the scheduler's forwards, and limits how many are in the ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from streamdiff import clock
from streamdiff.pipeline.device_timer import StreamTimer
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate, StageMessage
from streamdiff.pipeline.row_faults.errors import ROW_ERRORS, at, check_own, describe, fault_key
from streamdiff.pipeline.row_faults.returned import ReturnedRows
from streamdiff.pipeline.runner.sampler import Finished, LatentSampler, SamplerSession
from streamdiff.pipeline.scheduler.row_limit import RingSlots
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler
from streamdiff.pipeline.scheduler.step import MicroStep


class InFlightQueue:
    """Rank 0's `Receiver`: session updates first, in the order they were given, then what the scheduler hands out.

    At most `limit` messages are in the ring at once, updates included. Every link has two slots, so the ring can never
    fill up and stand still. A background session's forward enters only where a stage would have nothing to do. Rows
    that could enter wait up to `wait_s` for others to share their forward.
    """

    def __init__(
        self,
        scheduler: StreamBatchScheduler,
        sampler: LatentSampler,
        limit: int,
        timed: StreamTimer,
        wait_s: float = 0.0,
        pop_text: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        """`timed` is that of the stream that the head computes on. `pop_text` takes the text that a stage posted under
        a key (`errors.fault_key`); None: there is none."""
        self.scheduler, self.sampler, self.limit, self.wait_s = scheduler, sampler, limit, wait_s
        self._held_since_s: float | None = None
        self._timed = timed
        self.queued: deque[StageMessage] = deque()  # what enters before the scheduler's forwards
        self.in_ring: deque[StageMessage] = deque()  # in order; rows with their inputs, as they may be tried again
        self.returned, self._pop_text = ReturnedRows(), pop_text
        self._streams: deque[list[SamplerSession | None]] = deque()  # of each message in the ring that of each row
        self.stopping = False
        self.answers: deque[tuple[MessageKind, SessionUpdate]] = deque()
        """What has come back of messages that are answered."""

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        """The next message that may enter, or None; never waits. Mutates: self, scheduler, sampler."""
        taken = len(self.in_ring)
        if taken >= self.limit:
            return None
        if self.queued:
            message = self.queued.popleft()
        elif self.stopping or self.held_s() > 0:
            return None
        else:
            rows = self.scheduler.next(background=taken < self.scheduler.stages, slots=self._slots())
            if not rows or (message := self._forward_of(rows)) is None:
                return None
        self.in_ring.append(message if message.kind is MessageKind.ROWS else message.bare)
        self._streams.append([self.sampler.sessions.get(row.session) for row in message.rows])
        return message

    def _slots(self) -> RingSlots | None:
        """What the ring can still take; None: a forward takes one row anyway."""
        if self.scheduler.max_rows <= 1:
            return None
        live = sum(not self.scheduler.is_background(each.rows) for each in self.in_ring)
        return RingSlots(self.limit - len(self.in_ring), self.limit - live, self.limit)

    def _forward_of(self, rows: list[MicroStep]) -> StageMessage | None:
        """Those of the scheduler's rows that have inputs, with these; None: none has. Mutates: self, sampler."""
        self._held_since_s = None
        with self._timed.work(StageMessage(MessageKind.ROWS, tuple(rows))):
            rows, tensors = self._inputs(rows)
        self.sampler.look_ahead(rows)
        return StageMessage(MessageKind.ROWS, tuple(rows), None, tensors) if rows else None

    def _inputs(self, rows: list[MicroStep]) -> tuple[list[MicroStep], tuple[Tensor, ...]]:
        """Those of the rows that have inputs, and these; sessions of which they cannot be made are over. Mutates: self,
        sampler."""
        try:
            return rows, self.sampler.inputs(rows)
        except ROW_ERRORS as error:
            check_own(error)
        kept, parts = [], []
        for session in dict.fromkeys(row.session for row in rows):
            own = [row for row in rows if row.session == session]
            try:
                parts.append(self.sampler.inputs(own))
                kept += own
            except ROW_ERRORS as error:
                check_own(error)
                self.returned.fail_session(session, own[0], describe(error, f"{at(own[0])} could not begin"))
        return kept, tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def forget(self, session: int) -> None:
        """Rows of the session's stream that were to run once more no longer are. Mutates: self."""
        for message in [each for each in self.queued if each.rows and each.rows[0].session == session]:
            self.queued.remove(message)

    def held_s(self) -> float:
        """Seconds for which what is ready still waits for rows of other sessions; 0: for nothing. Mutates: self."""
        if self.wait_s == 0 or len(self.in_ring) >= self.limit or not self.scheduler.may_gain_rows:
            self._held_since_s = None
            return 0.0
        now_s = clock.monotonic_s()
        self._held_since_s = now_s if self._held_since_s is None else self._held_since_s
        return max(0.0, self._held_since_s + self.wait_s - now_s)

    def notify(self, call: Callable[[], None]) -> None:
        """Does nothing: no other rank sends to this queue."""

    def close(self, limit_s: float = 0.0) -> None:
        """Let no more forwards enter. Mutates: self."""
        self.stopping = True

    def back(self, message: StageMessage) -> list[Finished]:
        """Process a message that has come back; returns finished chunks. Mutates: self, scheduler, sampler.

        Raises:
            EngineFailure: one session after the other fails.
        """
        entered, streams = self.in_ring.popleft(), self._streams.popleft()
        if message.kind.is_answered and message.update is not None:
            self.answers.append((message.kind, message.update))
        if message.kind is not MessageKind.ROWS:
            return []
        finished: list[Finished] = []
        with self._timed.work(entered.bare):
            for row, flow, ok in zip(
                message.rows, message.tensors[0].unbind(), self.returned.rows_ok(message), strict=True
            ):
                row_index = entered.rows.index(row)
                if ok:
                    finished += self._advance(row, flow)
                elif streams[row_index] is not None and self.sampler.sessions.get(row.session) is streams[row_index]:
                    self._failed(entered, row_index)
        return finished

    def _advance(self, row: MicroStep, flow: Tensor) -> list[Finished]:
        """Take over a row's flow `[C, F, h, w]`. Mutates: self, scheduler, sampler."""
        try:
            finished = self.sampler.advance(row, flow)
        except ROW_ERRORS as error:
            check_own(error)
            self.returned.fail_session(row.session, row, describe(error, f"{at(row)} could not be taken over"))
            return []
        self.scheduler.returned(row)
        return [] if finished is None else [finished]

    def _failed(self, entered: StageMessage, row_index: int) -> None:
        """Handle a row that came back as NaN, of a stream that goes on: queue it once more, alone and before anything
        else, or fail its session. Mutates: self."""
        row = entered.rows[row_index]
        if self.stopping or row.session in self.returned.failed_sessions:
            return
        fault, session = self._pop_text(fault_key(row.session, row.epoch)), self.sampler.sessions[row.session]
        behind = [replace(entered.bare, rows=entered.rows[row_index + 1 :]), *self.in_ring]
        may_repeat = self.sampler.spec.repeats and not row.recaches
        if may_repeat and self.returned.should_retry(row, fault, behind, session.kv_context):
            tensors = tuple(tensor[row_index : row_index + 1] for tensor in entered.tensors)
            self.queued.appendleft(StageMessage(MessageKind.ROWS, (row,), None, tensors))
        else:
            self.returned.fail_session(row.session, row, fault)
