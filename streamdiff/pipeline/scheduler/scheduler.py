"""StreamBatchScheduler: decides which micro-step enters the ring next.

Pure logic: no torch, no clock, no I/O. Events in (`open`, `returned`, `set_frame_credit`, ...), decisions out (`next`).
The rules are in docs/design.md, section 4; what a micro-step attends to follows from them, never from timing. New
chunks of `same_step` sessions are paced, see `timetable_tick`; `SchedulerState` has one session's rules.

**A first chunk with more steps.** Steps are numbered from the end: the last step and the clean pass have the same
number in every chunk. A longer first chunk begins at a negative step, so rules compare steps equally far from the end.

**Chunks that are made together.** A longer first chunk is split into chunks that run as rows of one forward and see
each other. Here they are one chunk, number 0; the next chunk waits until their last pass has entered.

**A change of step count.** It applies to chunks admitted after all those in flight have come back (`drain`,
`set_steps`), so no chunk overtakes an earlier one, and no rule compares chunks with different step counts. Meanwhile
the newest chunk in flight has no follower and waits for none, as before a rerun. Other sessions go on.

**Background sessions** (jobs) take the forwards that no other session has a row for, and share none with others. What
other sessions are handed, and in which order, is the same with and without them: no forward of theirs goes out while
another session waits.

**Rows.** Where `max_rows` is above 1, rows of several sessions share a forward, as many as leave the ring no emptier
than it is without, and only as many as pay for what they cost (`RowLimit`; docs/decisions/0031-batching.md). Which may
is declared on the fields of `MicroStep` and `SchedulerState`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from streamdiff.core import PER_ROW, PER_STEP, SHARED, MicroStep, differing_field, in_flight_limit
from streamdiff.pipeline.scheduler.row_limit import ForwardCounts, RingSlots, RowLimit, RowsNow
from streamdiff.session_state.fields import DERIVED, KEPT, STATE, reset, session_state

RERUN = -1
"""The choice of a session that lets a finished chunk's clean pass run once more."""


@session_state("chunk-in-flight")
@dataclass(slots=True)
class ChunkInFlight:
    """A chunk in flight. `entered` is the last step that entered the ring, `back` the last whose result has returned;
    `-1 - extra` before any.

    `tick` is the tick of its step 0 in the timetable, `extra` the number of steps before step 0.
    """

    number: int = field(metadata=KEPT)
    epoch: int = field(metadata=KEPT)
    entered: int = field(metadata=KEPT)
    back: int = field(metadata=KEPT)
    extra: int = field(default=0, metadata=DERIVED)
    tick: int = field(default=0, metadata=DERIVED)


@session_state("scheduled")
@dataclass(slots=True)
class SchedulerState:
    """State of one session. `chunks` are those in flight, oldest first, numbered without gaps up to `next_chunk` - 1. A
    chunk has `steps` steps, the stream's first `first_extra` more; the first `first_chunks` are made together.

    `rerun` are finished chunks whose clean pass is due once more, oldest first, before a new chunk is admitted; with
    `rerun_as_one` as rows of one forward. While it is `draining` none is, and those in flight wait for no follower.
    While it is `held`, for a snapshot, nothing of it enters or changes. No chunk from `wait_at` on is admitted.
    `choice`: what is due next: an index into `chunks`, `len(chunks)` to admit one, RERUN, or None. Cached; `stale`
    invalidates it. `waiting_since`: the scheduler's count of forwards of its kind when it last got a row or first had a
    choice; `rows_before`: their row count before that row. `frame_credit`: frames it may still admit.

    Each field says whether sessions whose rows share a forward may differ in it, see `step`. Model, size, dtype and
    LoRA are the engine's, so all its sessions have them in common.
    """

    name: int = field(metadata=PER_ROW | DERIVED)
    steps: int = field(metadata=PER_ROW | DERIVED)
    first_extra: int = field(metadata=PER_ROW | DERIVED)
    kv_context: str = field(metadata=PER_ROW | DERIVED)
    epoch: int = field(metadata=PER_ROW | DERIVED)
    stages: int = field(metadata=SHARED | DERIVED)
    chunk_frames: int = field(metadata=SHARED | DERIVED)
    in_flight_limit: int = field(metadata=PER_ROW | DERIVED)
    waiting_since: int = field(metadata=PER_ROW | DERIVED)
    first_chunks: int = field(default=1, metadata=PER_ROW | DERIVED)
    background: bool = field(default=False, metadata=SHARED | DERIVED)
    frame_credit: int = field(default=0, metadata=PER_ROW | STATE)
    paused: bool = field(default=False, metadata=PER_ROW | KEPT)
    next_chunk: int = field(default=0, metadata=PER_ROW | STATE)
    chunks: list[ChunkInFlight] = field(default_factory=list, metadata=PER_ROW | STATE)
    rerun: list[int] = field(default_factory=list, metadata=PER_ROW | STATE)
    rerun_as_one: bool = field(default=False, metadata=PER_ROW | STATE)
    draining: bool = field(default=False, metadata=PER_ROW | KEPT)
    held: bool = field(default=False, metadata=PER_ROW | DERIVED)
    wait_at: int | None = field(default=None, metadata=PER_ROW | DERIVED)
    rows_before: int = field(default=0, metadata=PER_ROW | DERIVED)
    choice: int | None = field(default=None, metadata=PER_ROW | DERIVED)
    stale: bool = field(default=True, metadata=PER_ROW | DERIVED)

    def derive(self) -> None:
        """Place chunks in flight on the timetable of this ring, and have the choice recomputed. Mutates: self."""
        for chunk in self.chunks:
            chunk.extra, chunk.tick = self.extra(chunk.number), self._tick_of(chunk.number)
        self.stale = True

    @property
    def passes(self) -> int:
        """Micro-steps of one chunk, from step 0 on; `same_step` needs no clean pass."""
        return self.steps if self.kv_context in PER_STEP else self.steps + 1

    def extra(self, chunk: int) -> int:
        """Steps of a chunk before its step 0."""
        return self.first_extra if chunk == 0 else 0

    def together(self, chunk: int) -> int:
        """Number of chunks that run as rows of one forward, from `chunk` on."""
        return self.first_chunks if chunk == 0 else 1

    def next_tick(self, chunk: ChunkInFlight) -> int:
        """Tick of the chunk's next step in the timetable."""
        return chunk.tick + (chunk.entered + 1) * self.stages

    @property
    def fits(self) -> bool:
        """Whether the frame credit covers the next admission."""
        return self.frame_credit >= self.chunk_frames * self.together(self.next_chunk)

    @property
    def beginning(self) -> bool:
        """Whether chunks that are made together still have passes to enter."""
        return self.first_chunks > 1 and any(c.number == 0 and c.entered < self.passes - 1 for c in self.chunks)

    @property
    def waiting_rows(self) -> int:
        """Rows of this session ready at rank 0, for a `choice` that is not None. In `staircase` one per returned chunk,
        plus a new chunk if that is the choice; in the other KV contexts always 1."""
        if self.kv_context != "staircase":
            return 1
        back = sum(chunk.back == chunk.entered < self.passes - 1 for chunk in self.chunks)
        return max(back + (self.choice == len(self.chunks)), 1)

    @property
    def unfinished_frames(self) -> int:
        """Frames of the chunks that are still denoised."""
        return self.chunk_frames * sum(chunk.back < self.steps - 1 for chunk in self.chunks)

    def choose(self) -> int | None:
        """Compute `choice` from the session's state. Changes nothing."""
        count = len(self.chunks)
        waits = self.wait_at is not None and self.next_chunk >= self.wait_at
        held = bool(self.rerun) or self.draining or self.beginning or waits
        may_admit = self.fits and count < self.in_flight_limit and not held
        if self.paused or self.held:
            return None
        if self.rerun and all(chunk.entered == self.passes - 1 for chunk in self.chunks):
            return RERUN  # whatever could read the old keys has gone ahead
        if self.kv_context in PER_STEP:
            if may_admit and self._nothing_stands_before(self._tick_of(self.next_chunk)) and self._behind(count, 0):
                return count
            ready = [index for index in range(count) if self._ready(index)]
            return min(ready, key=lambda index: self.next_tick(self.chunks[index]), default=None)
        for index in range(count):
            if self._ready(index):
                return index
        return count if may_admit and self._behind(count, 0) else None

    def row(self, choice: int) -> MicroStep:
        """The micro-step for `choice` (see the class). Changes nothing."""
        if choice == RERUN:
            steps = self.steps + self.extra(self.rerun[0])
            return MicroStep(self.name, self.rerun[0], steps, steps, self.epoch)
        if choice == len(self.chunks):
            return MicroStep(self.name, self.next_chunk, 0, self.steps + self.extra(self.next_chunk), self.epoch)
        chunk = self.chunks[choice]
        step, steps = chunk.entered + 1 + chunk.extra, self.steps + chunk.extra
        return MicroStep(self.name, chunk.number, step, steps, chunk.epoch)

    def rows(self, choice: int) -> list[MicroStep]:
        """The micro-step for `choice`, and those of the chunks that run in the same forward with it."""
        row = self.row(choice)
        chunks: Sequence[int] = range(row.chunk, row.chunk + self.together(row.chunk))
        if choice == RERUN and self.rerun_as_one:
            counts = [(chunk, self.steps + self.extra(chunk)) for chunk in self.rerun]
            end = self.rerun[-1]
            return [MicroStep(self.name, chunk, steps, steps, self.epoch, end) for chunk, steps in counts]
        if choice == RERUN:  # the window may have left some of them
            chunks = [chunk for chunk in self.rerun if chunk in chunks]
        return [replace(row, chunk=chunk) for chunk in chunks] if len(chunks) > 1 else [row]

    def enter(self, choice: int) -> None:
        """Record that the step for `choice` has entered the ring. Mutates: self."""
        if choice == RERUN:
            del self.rerun[: len(self.rows(choice))]
            self.choice, self.stale = None, True
            return
        if choice == len(self.chunks):
            number = self.next_chunk
            extra = self.extra(number)
            self.chunks.append(ChunkInFlight(number, self.epoch, -1 - extra, -1 - extra, extra, self._tick_of(number)))
            self.frame_credit -= self.chunk_frames * self.together(number)
            self.next_chunk += self.together(number)
        self.chunks[choice].entered += 1
        self.choice, self.stale = None, True

    def come_back(self, row: MicroStep) -> None:
        """Record that the result of `row` has returned; ignored if its chunk is not in flight. Mutates: self."""
        chunk = next((each for each in self.chunks if each.number == row.chunk), None)
        if chunk is None:  # also for those that go together with chunk 0, which stands for them
            return
        step = row.step - chunk.extra
        if chunk.epoch != row.epoch or chunk.back != step - 1 or chunk.entered < step:
            return
        chunk.back, self.stale = step, True
        while self.chunks and self.chunks[0].back == self.passes - 1:
            del self.chunks[0]

    def _tick_of(self, chunk: int) -> int:
        return timetable_tick(chunk, stages=self.stages, passes=self.passes)

    def _nothing_stands_before(self, tick: int) -> bool:
        """Whether every step in flight that the timetable has before `tick`, a new chunk's, has entered."""
        waiting = (chunk for chunk in self.chunks if chunk.entered < self.passes - 1)
        return all(self.next_tick(chunk) > tick for chunk in waiting)

    def _ready(self, index: int) -> bool:
        """Rules 1 and 2 of docs/design.md, section 4, for the next step of a chunk in flight."""
        chunk = self.chunks[index]
        step = chunk.entered + 1
        if chunk.back != chunk.entered or step > self.passes - 1 or not self._behind(index, step):
            return False
        # Chunk n + k reads this one's step s - 1 in its own step s - 1 - k: all of those enter before step s does. They
        # have when chunk n + s - 1 is in flight, for it entered when the one before it was at step 1, and so on. Before
        # a rerun or other steps no more are to come, and those there are have to be asked.
        if self.kv_context != "staircase" or len(self.chunks) >= index + step or self.beginning:
            return True
        readers = enumerate(self.chunks[index + 1 :], start=1)
        return (bool(self.rerun) or self.draining) and all(reader.entered >= step - 1 - k for k, reader in readers)

    def _behind(self, index: int, step: int) -> bool:
        """Whether the chunk before `index` has progressed as far as the KV context requires for `step`."""
        if index == 0:
            return True
        ahead = {"clean": self.steps, "staircase": step + 1}.get(self.kv_context, step)
        return self.chunks[index - 1].entered >= min(ahead, self.passes - 1)


def timetable_tick(chunk: int, *, stages: int, passes: int) -> int:
    """Tick on which the timetable of a paced session has step 0 of a chunk; step s stands `s * stages` ticks later.

    With P stages and S passes per chunk, a round is P chunks in P * S ticks: chunk i of it stands on tick
    `i * S + floor(i * gcd(P, S) / P)`. The second term moves chunks on by a tick whenever the first falls on the same
    stage (modulo P) as an earlier one; so all micro-steps of all chunks stand on ticks of their own, without a hole,
    and starts are S or S + 1 ticks apart, once a round `S + 1 - gcd(P, S)`.
    """
    rounds, place = divmod(chunk, stages)
    return rounds * stages * passes + place * passes + place * gcd(stages, passes) // stages


PATIENCE = 4
"""A session that has waited for this many forwards per open session goes first, whatever its slack."""


class StreamBatchScheduler:
    """Picks the rows of the next forward from all open sessions.

    Background sessions come last. Among the others, and among these, the one with the most frame credit (the least
    playout slack) goes first, then the one that has waited longest. Of the others nobody starves: one that has
    something to hand out gets a row in one of the next `(PATIENCE + 1) * N` forwards, where N such are open, whatever
    their frame credits are.

    A row that is ready is held back by paced admission alone, which concerns new chunks of `same_step`
    sessions, and by its forward being full or of another kind (`differing_field`).

    Args:
        stages: stages of the ring, P.
        chunk_frames: frames that one chunk adds, the unit of `set_frame_credit`.
        first_chunks: chunks of a stream's beginning that are made together, in one forward whatever `max_rows`.
        max_rows: micro-steps that may share a forward.
    """

    def __init__(
        self,
        *,
        stages: int,
        chunk_frames: int,
        max_rows: int = 1,
        first_chunks: int = 1,
    ) -> None:
        self.stages, self.chunk_frames, self.max_rows = stages, chunk_frames, max_rows
        self.first_chunks = first_chunks
        self._sessions: dict[int, SchedulerState] = {}
        self._forwards: Counter[bool] = Counter()  # handed out so far, by `background`: what waiting is counted in
        self._rows: Counter[bool] = Counter()  # the same of rows, where forwards may have several
        self._batch_break_reason = ""  # why nothing has joined the forward that is being put together
        self.counts = ForwardCounts()
        self.row_limit = RowLimit(max_rows)

    def set_row_costs(self, costs: Sequence[float]) -> None:
        """Say what forwards of 1, 2, ... `max_rows` rows take, as `RowLimit` wants it; raises what that does. Mutates:
        self."""
        self.row_limit = RowLimit(self.max_rows, costs)

    def open(
        self,
        session: int,
        *,
        steps: int,
        kv_context: str,
        epoch: int,
        first_steps: int | None = None,
        background: bool = False,
    ) -> None:
        """Add a session; its frame credit is 0. `epoch` must be one that this slot never had, see `returned`; the
        stream's first chunk has `first_steps` steps, by default as many as the others. With `background` it takes what
        others leave.

        Raises:
            ValueError: the KV context is not known.
        """
        extra, limit = (first_steps or steps) - steps, self._limit(kv_context, steps)
        self._sessions[session] = SchedulerState(
            session, steps, extra, kv_context, epoch, self.stages, self.chunk_frames, limit,
            self._forwards[background], self.first_chunks, background,
        )  # fmt: skip

    def close(self, session: int) -> None:
        """Drop a session and what it has in flight; micro-steps that still come back are ignored."""
        self._sessions.pop(session, None)

    def reset(self, session: int, epoch: int) -> None:
        """Forget what is in flight and start again at chunk 0. `epoch` must be one that this slot never had."""
        state = self._sessions[session]
        reset(state)
        state.epoch = epoch

    def set_epoch(self, session: int, epoch: int) -> None:
        """Chunks admitted from now on belong to `epoch`."""
        self._sessions[session].epoch = epoch

    def rerun(self, session: int, chunks: Sequence[int], *, as_one: bool = False) -> None:
        """Let the clean pass of these finished chunks (or chunks in flight), oldest first, run once more under the
        session's epoch before a new chunk is admitted: one after the other, or `as_one`, the rows of a forward of
        their own, whatever `max_rows`. What is in flight runs to its end first; a rerun's result is not reported. Of a
        KV context with a clean pass."""
        state = self._sessions[session]
        state.rerun, state.rerun_as_one, state.stale = list(chunks), as_one, True

    def resume_at(self, session: int, chunk: int) -> None:
        """Let a stream that has not begun begin at `chunk`: those before it are finished, and only their clean pass is
        run, oldest first, before a chunk is admitted. Of a KV context that has one."""
        self.rerun(session, range(chunk))
        self._sessions[session].next_chunk = chunk

    def drain(self, session: int) -> None:
        """Admit no chunk of the session before `set_steps`; what is in flight runs to its end."""
        state = self._sessions[session]
        state.draining, state.stale = True, True

    def drained(self, session: int) -> bool:
        """Whether nothing of the session is in flight, and nothing due but a new chunk."""
        state = self._sessions[session]
        return not state.chunks and not state.rerun and not state.held

    def set_steps(self, session: int, *, steps: int, first_steps: int | None = None) -> None:
        """Chunks admitted from now on have `steps` steps, a first one `first_steps`; ends `drain`. Only where the
        session is `drained`."""
        state = self._sessions[session]
        state.steps, state.first_extra = steps, (first_steps or steps) - steps
        state.in_flight_limit = self._limit(state.kv_context, steps)
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

    def session(self, session: int) -> SchedulerState:
        """The state of a session, which is not to be changed while it is not held."""
        return self._sessions[session]

    def hold(self, session: int, held: bool) -> None:
        """As `set_paused`, beside it: for a snapshot, after which the session is as paused as before."""
        state = self._sessions[session]
        state.held, state.stale = held, True

    def wait_at(self, session: int, chunk: int | None) -> None:
        """Admit no chunk from this one on, as something is to change before; None: nothing is."""
        state = self._sessions[session]
        state.wait_at, state.stale = chunk, True

    def may_enter(self, session: int) -> bool:
        """Whether something of a session may enter now."""
        return self._choice(self._sessions[session]) is not None

    def set_frame_credit(self, session: int, frames: int) -> None:
        """Set the number of frames that may still be admitted; admitting a chunk takes `chunk_frames` of it."""
        state = self._sessions[session]
        did_fit, state.frame_credit = state.fits, frames
        state.stale |= state.fits != did_fit

    @property
    def in_flight(self) -> int:
        """Micro-steps that entered the ring and have not come back."""
        return sum(chunk.entered - chunk.back for state in self._sessions.values() for chunk in state.chunks)

    def next(self, *, background: bool = True, slots: RingSlots | None = None) -> list[MicroStep]:
        """The rows of the next forward, at most `max_rows` (or `first_chunks`), possibly none. They count as entered.
        Without `background` none of a background session. Rows are spread over the `slots` of the ring (`RowLimit`);
        None: a forward takes all that it can.

        Within a session: oldest chunk first, `same_step` by timetable. A chunk gives at most one row, as
        its next step needs this one's result. No row has a `differing_field` from the first.
        """
        rows: list[MicroStep] = []
        self._batch_break_reason = "none_ready"
        most = self.max_rows if slots is None else self._most_rows(slots)
        while len(rows) < most and not _recaches(rows) and (picked := self._pick(rows, most, background)):
            rows += picked
        if rows:
            self._forwards[self._sessions[rows[0].session].background] += 1
            self.counts.rows[len(rows)] += 1
            if len(rows) == 1 < self.max_rows:
                self.counts.alone[self._batch_break_reason] += 1
        return rows

    def _most_rows(self, slots: RingSlots) -> int:
        """Most rows of the next forward. Mutates: why nothing joins it."""
        if not self.row_limit.shares:
            self._batch_break_reason = "cost" if self.max_rows > 1 else "none_ready"
            return 1
        jobs_only = all(state.background for state in self._sessions.values() if self._choice(state) is not None)
        free = slots.free if jobs_only else slots.free_of_live
        most, self._batch_break_reason = self.row_limit.of(self._rows_now(), free, slots.all, jobs_only)
        return most

    def _rows_now(self) -> RowsNow:
        """Of the sessions whose turn it is: background ones, which no one else notices, do not count where another has
        a row."""
        ready = [state for state in self._sessions.values() if self._choice(state) is not None]
        live = any(not state.background for state in ready)
        counted = [state for state in self._sessions.values() if not (live and state.background)]
        running = [state for state in counted if state.choice is not None or state.chunks]
        return RowsNow(
            sum(state.waiting_rows for state in counted if state.choice is not None),
            sum(chunk.entered - chunk.back for state in counted for chunk in state.chunks),
            len(running) * min((state.passes for state in running), default=0),
        )

    def is_background(self, rows: Sequence[MicroStep]) -> bool:
        """Whether a forward is of background sessions that are still open."""
        return any((state := self._sessions.get(row.session)) is not None and state.background for row in rows)

    def returned(self, row: MicroStep) -> None:
        """Record that a micro-step's result has come back to rank 0. Results of closed or reset streams are ignored.

        Successive streams of one slot differ in their epochs and in nothing else. So an
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
        return in_flight_limit(kv_context, steps=steps, stages=self.stages)

    def _pick(self, taken: list[MicroStep], most: int, background: bool) -> list[MicroStep]:
        """Take one more row, or rows that must share a forward, for the forward that has `taken`, of `most` rows.
        Mutates: self."""
        first = self._sessions[taken[0].session] if taken else None
        waiting = [
            state
            for state in self._sessions.values()
            if self._choice(state) is not None and (first is not None or background or not state.background)
        ]
        open_sessions = Counter(state.background for state in self._sessions.values())
        in_forward, written = Counter(row.session for row in taken), {(row.session, row.chunk) for row in taken}
        for state in sorted(
            waiting, key=lambda state: self._rank(state, open_sessions[state.background], in_forward[state.name], most)
        ):
            choice = state.choice
            assert choice is not None
            rows = state.rows(choice)
            # Rows of a chunk write the same keys; a clean pass and its rerun could meet in a forward.
            apart = written.isdisjoint((row.session, row.chunk) for row in rows) and not _recaches(rows)
            differs = first and (differing_field(first, state) or differing_field(taken[0], rows[0]))
            if not taken or (not differs and apart and len(taken) + len(rows) <= most):
                state.enter(choice)
                kind = state.background
                state.waiting_since, state.rows_before = self._forwards[kind] + 1, self._rows[kind]
                self._rows[kind] += self.max_rows > 1
                return rows
            self._batch_break_reason = differs or ("ring" if apart else "same_session")
        return []

    def _rank(self, state: SchedulerState, open_sessions: int, taken: int, most: int) -> tuple[int, ...]:
        """Sessions with a smaller rank go first; `open_sessions` of the same kind are open, and the forward that is put
        together has `taken` rows of this one, of `most` in all.

        Where rows share it, those of one forward have waited equally long: they take turns. And slack counts what
        is finished, else a session that has begun a chunk would be passed by all that have not.
        """
        patient = self._forwards[state.background] - state.waiting_since < PATIENCE * open_sessions
        credit = state.frame_credit + (state.unfinished_frames if most > 1 else 0)
        slack = -credit if patient else 0
        turn = state.rows_before if most > 1 else 0
        return state.background, patient, taken, slack, state.waiting_since, turn, state.name

    def _choice(self, state: SchedulerState) -> int | None:
        """The session's `choice`, recomputed if it is stale. Mutates: state."""
        if state.stale:
            waited, state.choice, state.stale = state.choice is not None, state.choose(), False
            if not waited and state.choice is not None:
                state.waiting_since = max(state.waiting_since, self._forwards[state.background])
        return state.choice


def _recaches(rows: Sequence[MicroStep]) -> bool:
    """Whether these rows are a window that is run again, whose forward is its own."""
    return bool(rows) and rows[0].recaches
