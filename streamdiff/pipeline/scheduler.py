"""StreamBatchScheduler: decides which micro-step enters the ring next.

Pure logic: no torch, no clock, no I/O. Events in (`open`, `returned`, `set_room`, ...), decisions out (`next`). The
rules are DESIGN section 4; what a micro-step attends to follows from them, never from timing. New chunks of `matched`
sessions are paced, see `timetable`.

**A first chunk with more steps.** Some models take more steps for the first chunk of a stream than for the others. All
chunks end together then: in here steps are numbered so that the last one, and the clean pass, have the same number in
every chunk, and the first chunk begins below 0. So what the rules say of step s of two neighbours is said of steps that
are as far from the end, and nothing else has to know.

**Another number of steps.** It holds for chunks that are admitted once all those in flight have come back (`drain`,
`set_steps`): so no chunk overtakes its elders, and no rule has to compare chunks with different numbers. Meanwhile the
newest chunk in flight has no follower and waits for none, as before a rerun. Other sessions go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamdiff.pipeline.contexts import in_flight_limit
from streamdiff.pipeline.microstep import MicroStep, compatible
from streamdiff.pipeline.timetable import timetable_tick

RERUN = -1
"""The choice of a session that lets a finished chunk's clean pass run once more."""

PATIENCE = 4
"""A session that has waited for this many forwards per open session goes first, whatever its slack."""


@dataclass(slots=True)
class _Chunk:
    """A chunk in flight: the last step that entered the ring, the last that came back; before any, `-1 - extra`.

    `tick` is where the timetable has its step 0, and `extra` the steps before that.
    """

    number: int
    epoch: int
    tick: int
    extra: int
    entered: int
    back: int


@dataclass(slots=True)
class _Session:
    """`chunks` are those in flight, oldest first; their numbers have no holes, and the last is `next_chunk` - 1. A
    chunk has `steps` steps, the stream's first `first_extra` more.

    `rerun` are finished chunks whose clean pass is due once more, oldest first, before a new chunk is admitted. While
    it is `draining` none is, and those in flight wait for no follower.
    `choice` is the index in `chunks` of the one whose step is due next, `len(chunks)` for a new one, RERUN for a clean
    pass once more, None for none. It is found anew where it is `stale`. `waiting_since` counts forwards: when there
    first was a choice, or the last row was handed out.
    """

    name: int
    steps: int
    first_extra: int
    kv_context: str
    epoch: int
    stages: int
    chunk_frames: int
    in_flight_limit: int
    waiting_since: int
    room: int = 0
    paused: bool = False
    next_chunk: int = 0
    chunks: list[_Chunk] = field(default_factory=list)
    rerun: list[int] = field(default_factory=list)
    draining: bool = False
    choice: int | None = None
    stale: bool = True

    @property
    def passes(self) -> int:
        """Micro-steps of one chunk, from step 0 on; `matched` needs no clean pass."""
        return self.steps if self.kv_context == "matched" else self.steps + 1

    def extra(self, chunk: int) -> int:
        """Steps of a chunk before its step 0."""
        return self.first_extra if chunk == 0 else 0

    def next_tick(self, chunk: _Chunk) -> int:
        """Where the timetable has the chunk's next step."""
        return chunk.tick + (chunk.entered + 1) * self.stages

    @property
    def fits(self) -> bool:
        """Whether there is room for one more chunk."""
        return self.room >= self.chunk_frames

    def choose(self) -> int | None:
        """What `choice` should be now."""
        count = len(self.chunks)
        may_admit = self.fits and count < self.in_flight_limit and not self.rerun and not self.draining
        if self.paused:
            return None
        if self.rerun and all(chunk.entered == self.passes - 1 for chunk in self.chunks):
            return RERUN  # whatever could read the old keys has gone ahead
        if self.kv_context == "matched":
            if may_admit and self._nothing_stands_before(self._tick_of_next()):
                return count
            ready = [index for index in range(count) if self._ready(index)]
            return min(ready, key=lambda index: self.next_tick(self.chunks[index]), default=None)
        for index in range(count):
            if self._ready(index):
                return index
        return count if may_admit and self._behind(count, 0) else None

    def row(self, choice: int) -> MicroStep:
        """The next step of the chunk at that index; changes nothing."""
        if choice == RERUN:
            steps = self.steps + self.extra(self.rerun[0])
            return MicroStep(self.name, self.rerun[0], steps, steps, self.epoch)
        if choice == len(self.chunks):
            return MicroStep(self.name, self.next_chunk, 0, self.steps + self.extra(self.next_chunk), self.epoch)
        chunk = self.chunks[choice]
        step, steps = chunk.entered + 1 + chunk.extra, self.steps + chunk.extra
        return MicroStep(self.name, chunk.number, step, steps, chunk.epoch)

    def enter(self, choice: int) -> None:
        """That step has entered the ring."""
        if choice == RERUN:
            del self.rerun[0]
            self.choice, self.stale = None, True
            return
        if choice == len(self.chunks):
            extra = self.extra(self.next_chunk)
            self.chunks.append(_Chunk(self.next_chunk, self.epoch, self._tick_of_next(), extra, -1 - extra, -1 - extra))
            self.next_chunk += 1
            self.room -= self.chunk_frames
        self.chunks[choice].entered += 1
        self.choice, self.stale = None, True

    def come_back(self, row: MicroStep) -> None:
        """That step's result is here; nothing happens if it is not one of a chunk in flight."""
        index = row.chunk - self.chunks[0].number if self.chunks else -1
        if not 0 <= index < len(self.chunks):
            return
        chunk = self.chunks[index]
        step = row.step - chunk.extra
        if chunk.epoch != row.epoch or chunk.back != step - 1 or chunk.entered < step:
            return
        chunk.back, self.stale = step, True
        while self.chunks and self.chunks[0].back == self.passes - 1:
            del self.chunks[0]

    def _tick_of_next(self) -> int:
        return timetable_tick(self.next_chunk, stages=self.stages, passes=self.passes)

    def _nothing_stands_before(self, tick: int) -> bool:
        """Whether every step in flight that the timetable has before `tick`, a new chunk's, has entered.

        Of a chunk whose steps have all entered the next would be P * S ticks after its first. That is after any chunk
        that may be admitted while it is in flight.
        """
        return all(self.next_tick(chunk) > tick for chunk in self.chunks)

    def _ready(self, index: int) -> bool:
        """Rules 1 and 2 of DESIGN section 4 for the next step of a chunk in flight."""
        chunk = self.chunks[index]
        step = chunk.entered + 1
        if chunk.back != chunk.entered or step >= self.passes or not self._behind(index, step):
            return False
        # Chunk n + k reads this one's step s - 1 in its own step s - 1 - k: all of those enter before step s does. They
        # have when chunk n + s - 1 is in flight, for it entered when the one before it was at step 1, and so on. Before
        # a rerun or other steps no more are to come, and those there are have to be asked.
        if self.kv_context != "staircase" or len(self.chunks) >= index + step:
            return True
        readers = enumerate(self.chunks[index + 1 :], start=1)
        return (bool(self.rerun) or self.draining) and all(reader.entered >= step - 1 - k for k, reader in readers)

    def _behind(self, index: int, step: int) -> bool:
        """Whether the chunk before `index` is as far as its KV context wants it for `step`; finished chunks are."""
        if index == 0:
            return True
        ahead = {"clean": self.steps, "staircase": step + 1, "matched": step}[self.kv_context]
        return self.chunks[index - 1].entered >= min(ahead, self.passes - 1)


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
        max_rows: micro-steps that may share a forward.
        clean_with_next: whether a clean pass takes the next chunk's first step with it, as a row beyond `max_rows`
            where that is 1.

    Raises:
        ValueError: one of them is below 1.
    """

    def __init__(self, *, stages: int, chunk_frames: int, max_rows: int = 1, clean_with_next: bool = False) -> None:
        for name, value in (("stages", stages), ("chunk_frames", chunk_frames), ("max_rows", max_rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        self.stages, self.chunk_frames, self.max_rows = stages, chunk_frames, max_rows
        self.clean_with_next = clean_with_next
        self._sessions: dict[int, _Session] = {}
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
        self._sessions[session] = _Session(
            session, steps, extra, kv_context, epoch, self.stages, self.chunk_frames, limit, self._forwards
        )

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
        """The rows of the next forward, at most `max_rows`, possibly none. They count as entered.

        Within a session: oldest chunk first, `matched` by its timetable. A chunk gives at most one row, since its next
        step needs this one's result. All rows are `compatible` with the first.
        """
        rows: list[MicroStep] = []
        while len(rows) < self.max_rows and (row := self._pick(rows)):
            rows.append(row)
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

    def _pick(self, taken: list[MicroStep]) -> MicroStep | None:
        """Hand out one more row for the forward that has `taken`."""
        waiting = [state for state in self._sessions.values() if self._choice(state) is not None]
        for state in sorted(waiting, key=self._rank):
            choice = state.choice
            assert choice is not None
            row = state.row(choice)
            if not taken or (compatible(taken[0], row) and not any(_same_chunk(row, other) for other in taken)):
                state.enter(choice)
                state.waiting_since = self._forwards + 1
                return row
        return None

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

    def _rank(self, state: _Session) -> tuple[bool, int, int, int]:
        """Sessions with a smaller rank go first."""
        patient = self._forwards - state.waiting_since < PATIENCE * len(self._sessions)
        return patient, -state.room if patient else 0, state.waiting_since, state.name

    def _choice(self, state: _Session) -> int | None:
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
