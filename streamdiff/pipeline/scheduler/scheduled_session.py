"""One session as the scheduler sees it: its chunks in flight, and the rules by which its next micro-step is found.

See `scheduler` for what its words mean. Pure logic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from streamdiff.pipeline.scheduler.step import MicroStep

RERUN = -1
"""The choice of a session that lets a finished chunk's clean pass run once more."""


@dataclass(slots=True)
class ChunkInFlight:
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
class ScheduledSession:
    """`chunks` are those in flight, oldest first; their numbers have no holes, and the last is `next_chunk` - 1. A
    chunk has `steps` steps, the stream's first `first_extra` more; the first `first_chunks` are made together.

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
    first_chunks: int = 1
    room: int = 0
    paused: bool = False
    next_chunk: int = 0
    chunks: list[ChunkInFlight] = field(default_factory=list)
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

    def together(self, chunk: int) -> int:
        """Chunks that are made together from `chunk` on."""
        return self.first_chunks if chunk == 0 else 1

    def next_tick(self, chunk: ChunkInFlight) -> int:
        """Where the timetable has the chunk's next step."""
        return chunk.tick + (chunk.entered + 1) * self.stages

    @property
    def fits(self) -> bool:
        """Whether there is room for what would be admitted next."""
        return self.room >= self.chunk_frames * self.together(self.next_chunk)

    @property
    def beginning(self) -> bool:
        """Whether chunks that are made together still have passes to enter."""
        return self.first_chunks > 1 and any(c.number == 0 and c.entered < self.passes - 1 for c in self.chunks)

    def choose(self) -> int | None:
        """What `choice` should be now."""
        count = len(self.chunks)
        held = bool(self.rerun) or self.draining or self.beginning
        may_admit = self.fits and count < self.in_flight_limit and not held
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

    def rows(self, choice: int) -> list[MicroStep]:
        """The same, with the rows of chunks that go together with it."""
        row = self.row(choice)
        chunks: Sequence[int] = range(row.chunk, row.chunk + self.together(row.chunk))
        if choice == RERUN:  # the window may have left some of them
            chunks = [chunk for chunk in self.rerun if chunk in chunks]
        return [replace(row, chunk=chunk) for chunk in chunks] if len(chunks) > 1 else [row]

    def enter(self, choice: int) -> None:
        """That step has entered the ring."""
        if choice == RERUN:
            del self.rerun[: len(self.rows(choice))]
            self.choice, self.stale = None, True
            return
        if choice == len(self.chunks):
            extra = self.extra(self.next_chunk)
            self.chunks.append(
                ChunkInFlight(self.next_chunk, self.epoch, self._tick_of_next(), extra, -1 - extra, -1 - extra)
            )
            self.room -= self.chunk_frames * self.together(self.next_chunk)
            self.next_chunk += self.together(self.next_chunk)
        self.chunks[choice].entered += 1
        self.choice, self.stale = None, True

    def come_back(self, row: MicroStep) -> None:
        """That step's result is here; nothing happens if it is not one of a chunk in flight."""
        chunk = next((each for each in self.chunks if each.number == row.chunk), None)
        if chunk is None:  # also for those that go together with chunk 0, which stands for them
            return
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
        """Rules 1 and 2 of docs/design.md, section 4, for the next step of a chunk in flight."""
        chunk = self.chunks[index]
        step = chunk.entered + 1
        if chunk.back != chunk.entered or step >= self.passes or not self._behind(index, step):
            return False
        # Chunk n + k reads this one's step s - 1 in its own step s - 1 - k: all of those enter before step s does. They
        # have when chunk n + s - 1 is in flight, for it entered when the one before it was at step 1, and so on. Before
        # a rerun or other steps no more are to come, and those there are have to be asked.
        if self.kv_context != "staircase" or len(self.chunks) >= index + step or self.beginning:
            return True
        readers = enumerate(self.chunks[index + 1 :], start=1)
        return (bool(self.rerun) or self.draining) and all(reader.entered >= step - 1 - k for k, reader in readers)

    def _behind(self, index: int, step: int) -> bool:
        """Whether the chunk before `index` is as far as its KV context wants it for `step`; finished chunks are."""
        if index == 0:
            return True
        ahead = {"clean": self.steps, "staircase": step + 1, "matched": step}[self.kv_context]
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
