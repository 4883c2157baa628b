"""One session as the scheduler sees it: its chunks in flight, and the rules by which its next micro-step is found.

See `scheduler` for what its words mean. Pure logic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from streamdiff.core import PER_ROW, PER_STEP, SHARED, MicroStep
from streamdiff.session_state.fields import DERIVED, KEPT, STATE, session_state

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
    extra: int = field(metadata=KEPT)
    entered: int = field(metadata=KEPT)
    back: int = field(metadata=KEPT)
    tick: int = field(default=0, metadata=DERIVED)


@session_state("scheduled")
@dataclass(slots=True)
class ScheduledSession:
    """State of one session. `chunks` are those in flight, oldest first, numbered without gaps up to `next_chunk` - 1. A
    chunk has `steps` steps, the stream's first `first_extra` more; the first `first_chunks` are made together.

    `rerun` are finished chunks whose clean pass is due once more, oldest first, before a new chunk is admitted; with
    `rerun_as_one` as rows of one forward. While it is `draining` none is, and those in flight wait for no follower.
    While it is `held`, for a snapshot, nothing of it enters or changes.
    `choice`: what is due next: an index into `chunks`, `len(chunks)` to admit one, RERUN, or None. Cached; `stale`
    invalidates it. `waiting_since`: the scheduler's forward count when it last got a row or first had a choice;
    `rows_before`: its row count before that row. `frame_credit`: frames it may still admit.

    Each field says whether sessions whose rows share a forward may differ in it, see `step`. Model, size, dtype and
    LoRA are the engine's, so all its sessions have them in common.
    """

    name: int = field(metadata=PER_ROW | DERIVED)
    steps: int = field(metadata=PER_ROW | KEPT)
    first_extra: int = field(metadata=PER_ROW | KEPT)
    kv_context: str = field(metadata=PER_ROW | KEPT)
    epoch: int = field(metadata=PER_ROW | KEPT)
    stages: int = field(metadata=SHARED | DERIVED)
    chunk_frames: int = field(metadata=SHARED | DERIVED)
    in_flight_limit: int = field(metadata=PER_ROW | DERIVED)
    waiting_since: int = field(metadata=PER_ROW | DERIVED)
    first_chunks: int = field(default=1, metadata=PER_ROW | DERIVED)
    background: bool = field(default=False, metadata=SHARED | KEPT)
    frame_credit: int = field(default=0, metadata=PER_ROW | STATE)
    paused: bool = field(default=False, metadata=PER_ROW | KEPT)
    next_chunk: int = field(default=0, metadata=PER_ROW | STATE)
    chunks: list[ChunkInFlight] = field(default_factory=list, metadata=PER_ROW | STATE)
    rerun: list[int] = field(default_factory=list, metadata=PER_ROW | STATE)
    rerun_as_one: bool = field(default=False, metadata=PER_ROW | STATE)
    draining: bool = field(default=False, metadata=PER_ROW | KEPT)
    held: bool = field(default=False, metadata=PER_ROW | DERIVED)
    rows_before: int = field(default=0, metadata=PER_ROW | DERIVED)
    choice: int | None = field(default=None, metadata=PER_ROW | DERIVED)
    stale: bool = field(default=True, metadata=PER_ROW | DERIVED)

    def derive(self) -> None:
        """Place chunks in flight on the timetable of this ring, and have the choice computed anew. Mutates: self."""
        for chunk in self.chunks:
            chunk.tick = self._tick_of(chunk.number)
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
        held = bool(self.rerun) or self.draining or self.beginning
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
            self.chunks.append(ChunkInFlight(number, self.epoch, extra, -1 - extra, -1 - extra, self._tick_of(number)))
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
