"""StreamBatchScheduler: decides which micro-step enters the ring next.

Pure logic: no torch, no clock, no I/O. Events in (`open`, `returned`, `set_room`, ...), decisions out (`next`). The
rules are in docs/design.md, section 4; what a micro-step attends to follows from them, never from timing. New chunks of
`matched` sessions are paced, see `timetable`; one session's part is in `scheduled`.

**A first chunk with more steps.** Some models take more steps for the first chunk of a stream than for the others. All
chunks end together then: in here steps are numbered so that the last one, and the clean pass, have the same number in
every chunk, and the first chunk begins below 0. So what the rules say of step s of two neighbours is said of steps that
are as far from the end, and nothing else has to know.

**Chunks that are made together.** Where a stream's first chunk is longer than the others, its parts are chunks of their
own that go side by side, as rows of one forward that see each other. In here they are one chunk, number 0, and what
comes after waits until its last pass has entered: it is what everybody sees of them.

**Another number of steps.** It holds for chunks that are admitted once all those in flight have come back (`drain`,
`set_steps`): so no chunk overtakes its elders, and no rule has to compare chunks with different numbers. Meanwhile the
newest chunk in flight has no follower and waits for none, as before a rerun. Other sessions go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamdiff.pipeline.scheduler.kv_context import in_flight_limit
from streamdiff.pipeline.scheduler.scheduled_session import ScheduledSession
from streamdiff.pipeline.scheduler.step import MicroStep, compatible

PATIENCE = 4
"""A session that has waited for this many forwards per open session goes first, whatever its slack."""


class StreamBatchScheduler:
    """Sessions in, micro-steps out.

    Between sessions the one with the most room (the least playout slack) goes first, then the one that has waited
    longest. Nobody starves: a session that has something to hand out gets a row in one of the next
    `(PATIENCE + 1) * N` forwards, where N sessions are open, whatever the rooms are.

    A row that is ready is held back by paced admission alone, which concerns new chunks of `matched` sessions, and by
    its forward being full or not `compatible`.

    Args:
        stages: stages of the ring, P.
        chunk_frames: frames that one chunk adds, the unit of `set_room`.
        first_chunks: chunks of a stream's beginning that are made together, in one forward whatever `max_rows`.
        max_rows: micro-steps that may share a forward.
        clean_with_next: whether a clean pass takes the next chunk's first step with it, as a row beyond `max_rows`
            where that is 1.

    Raises:
        ValueError: one of them is below 1.
    """

    def __init__(
        self,
        *,
        stages: int,
        chunk_frames: int,
        max_rows: int = 1,
        clean_with_next: bool = False,
        first_chunks: int = 1,
    ) -> None:
        given = {"stages": stages, "chunk_frames": chunk_frames, "max_rows": max_rows, "first_chunks": first_chunks}
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        self.stages, self.chunk_frames, self.max_rows = stages, chunk_frames, max_rows
        self.clean_with_next, self.first_chunks = clean_with_next, first_chunks
        self._sessions: dict[int, ScheduledSession] = {}
        self._forwards = 0  # handed out so far: what waiting is counted in

    def open(self, session: int, *, steps: int, kv_context: str, epoch: int, first_steps: int | None = None) -> None:
        """Add a session; it has no room yet. `epoch` must be one that this slot never had, see `returned`; the stream's
        first chunk has `first_steps` steps, by default as many as the others.

        Raises:
            ValueError: the session is open already, or a value is out of range.
        """
        if session in self._sessions:
            raise ValueError(f"session {session} is open already; close it first")
        extra, limit = _extra(steps, first_steps), self._limit(kv_context, steps)
        self._sessions[session] = ScheduledSession(
            session, steps, extra, kv_context, epoch, self.stages, self.chunk_frames, limit, self._forwards,
            self.first_chunks,
        )  # fmt: skip

    def close(self, session: int) -> None:
        """Drop a session and what it has in flight; micro-steps that still come back are ignored."""
        self._sessions.pop(session, None)

    def reset(self, session: int, epoch: int) -> None:
        """Forget what is in flight and start again at chunk 0. `epoch` must be one that this slot never had."""
        state = self._sessions[session]
        state.chunks.clear()
        state.rerun.clear()
        state.next_chunk, state.epoch, state.room, state.stale = 0, epoch, 0, True

    def set_epoch(self, session: int, epoch: int) -> None:
        """Chunks admitted from now on belong to `epoch`."""
        self._sessions[session].epoch = epoch

    def rerun(self, session: int, chunks: Sequence[int]) -> None:
        """Let the clean pass of these finished chunks (or chunks in flight), oldest first, run once more under the
        session's epoch before a new chunk is admitted. What is in flight runs to its end first; nothing is told of a
        rerun's coming back.

        Raises:
            ValueError: the session's KV context has no clean pass.
        """
        state = self._sessions[session]
        if state.kv_context == "matched":
            raise ValueError("KV context matched has no clean pass that could run once more")
        state.rerun, state.stale = list(chunks), True

    def drain(self, session: int) -> None:
        """Admit no chunk of the session before `set_steps`; what is in flight runs to its end."""
        state = self._sessions[session]
        state.draining, state.stale = True, True

    def drained(self, session: int) -> bool:
        """Whether nothing of the session is in flight, and nothing due but a new chunk."""
        state = self._sessions[session]
        return not state.chunks and not state.rerun

    def set_steps(self, session: int, *, steps: int, first_steps: int | None = None) -> None:
        """Chunks admitted from now on have `steps` steps, a first one `first_steps`; ends `drain`.

        Raises:
            ValueError: chunks with other steps are in flight, or a value is out of range.
        """
        if not self.drained(session):
            raise ValueError(f"session {session} has chunks in flight; drain it before its steps change")
        state = self._sessions[session]
        extra, limit = _extra(steps, first_steps), self._limit(state.kv_context, steps)
        state.steps, state.first_extra, state.in_flight_limit = steps, extra, limit
        state.draining, state.stale = False, True

    def next_chunk(self, session: int) -> int:
        """Number of the chunk that is admitted next."""
        return self._sessions[session].next_chunk

    def oldest_epoch(self, session: int) -> int:
        """The oldest epoch that a chunk in flight still needs."""
        state = self._sessions[session]
        return min([chunk.epoch for chunk in state.chunks], default=state.epoch)

    def set_paused(self, session: int, paused: bool) -> None:
        """While a session is paused, nothing of it enters; what is in the ring comes back."""
        state = self._sessions[session]
        state.paused, state.stale = paused, True

    def set_room(self, session: int, frames: int) -> None:
        """How many more frames may be admitted now; admitting a chunk uses up `chunk_frames` of it."""
        state = self._sessions[session]
        did_fit, state.room = state.fits, frames
        state.stale |= state.fits != did_fit

    @property
    def in_flight(self) -> int:
        """Micro-steps that entered the ring and have not come back."""
        return sum(chunk.entered - chunk.back for state in self._sessions.values() for chunk in state.chunks)

    def next(self) -> list[MicroStep]:
        """The rows of the next forward, at most `max_rows` (or `first_chunks`), possibly none. They count as entered.

        Within a session: oldest chunk first, `matched` by its timetable. A chunk gives at most one row, since its next
        step needs this one's result. All rows are `compatible` with the first.
        """
        rows: list[MicroStep] = []
        while len(rows) < self.max_rows and (picked := self._pick(rows)):
            rows += picked
        if self.clean_with_next and (follower := self._follower(rows)):
            rows.append(follower)
        if rows:
            self._forwards += 1
        return rows

    def returned(self, row: MicroStep) -> None:
        """A micro-step's result has come back to the head. Results of closed or reset streams are ignored.

        Streams that had the same slot one after the other are told apart by their epochs and by nothing else. So an
        epoch must never be used twice in a slot: not after `reset`, and not after `close` and `open`.
        """
        state = self._sessions.get(row.session)
        if state is not None:
            state.come_back(row)

    @property
    def has_work(self) -> bool:
        """Whether `next` would hand out anything."""
        return any(self._choice(state) is not None for state in self._sessions.values())

    def _limit(self, kv_context: str, steps: int) -> int:
        """Chunks of a session that may be in flight at once."""
        limit = in_flight_limit(kv_context, steps=steps, stages=self.stages)
        return limit + 1 if kv_context == "clean" and self.clean_with_next else limit

    def _pick(self, taken: list[MicroStep]) -> list[MicroStep]:
        """Hand out one more row, or rows that go together, for the forward that has `taken`."""
        waiting = [state for state in self._sessions.values() if self._choice(state) is not None]
        for state in sorted(waiting, key=self._rank):
            choice = state.choice
            assert choice is not None
            rows = state.rows(choice)
            apart = not any(_same_chunk(row, other) for row in rows for other in taken)
            if not taken or (compatible(taken[0], rows[0]) and apart and len(taken) + len(rows) <= self.max_rows):
                state.enter(choice)
                state.waiting_since = self._forwards + 1
                return rows
        return []

    def _follower(self, rows: list[MicroStep]) -> MicroStep | None:
        """The first step of the chunk after a clean pass that is alone in its forward; hands it out."""
        if len(rows) != 1 or not rows[0].clean:
            return None
        state = self._sessions[rows[0].session]
        choice = self._choice(state) if state.kv_context == "clean" else None
        if choice != len(state.chunks):
            return None
        row = state.row(choice)
        state.enter(choice)
        return row

    def _rank(self, state: ScheduledSession) -> tuple[bool, int, int, int]:
        """Sessions with a smaller rank go first."""
        patient = self._forwards - state.waiting_since < PATIENCE * len(self._sessions)
        return patient, -state.room if patient else 0, state.waiting_since, state.name

    def _choice(self, state: ScheduledSession) -> int | None:
        """The session's choice, found anew where something has happened to it. Mutates: state."""
        if state.stale:
            waited, state.choice, state.stale = state.choice is not None, state.choose(), False
            if not waited and state.choice is not None:
                state.waiting_since = max(state.waiting_since, self._forwards)
        return state.choice


def _extra(steps: int, first_steps: int | None) -> int:
    """How many more steps a first chunk has. Raises ValueError for numbers that cannot be."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; at least 1 is needed")
    if first_steps is not None and first_steps < steps:
        raise ValueError(f"first_steps is {first_steps}, but a first chunk has at least as many as the others, {steps}")
    return 0 if first_steps is None else first_steps - steps


def _same_chunk(row: MicroStep, other: MicroStep) -> bool:
    """Whether both write the same keys; a clean pass and its rerun could meet in a forward."""
    return (row.session, row.chunk) == (other.session, other.chunk)
