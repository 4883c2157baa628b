"""StreamBatchScheduler: decides which micro-step enters the ring next.

Pure logic: no torch, no clock, no I/O. Events in (`open`, `returned`, `set_room`, ...), decisions out (`next`). The
rules are DESIGN section 4; what a micro-step attends to follows from them, never from timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from streamdiff.pipeline.microstep import MicroStep

KV_CONTEXTS = ("clean", "staircase", "matched")


@dataclass
class _Chunk:
    """A chunk in flight: the last step that entered the ring (-1: none), the last that came back."""

    number: int
    epoch: int
    entered: int = -1
    back: int = -1


@dataclass
class _Session:
    steps: int
    kv_context: str
    epoch: int
    in_flight_limit: int
    room: int = 0
    paused: bool = False
    next_chunk: int = 0
    chunks: list[_Chunk] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Micro-steps of one chunk; `matched` needs no clean pass."""
        return self.steps if self.kv_context == "matched" else self.steps + 1


class StreamBatchScheduler:
    """Sessions in, micro-steps out.

    Args:
        stages: stages of the ring, P.
        chunk_frames: frames that one chunk adds, the unit of `set_room`.
        max_rows: micro-steps that may share a forward.
    """

    def __init__(self, *, stages: int, chunk_frames: int, max_rows: int = 1) -> None:
        self.stages, self.chunk_frames, self.max_rows = stages, chunk_frames, max_rows
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, *, steps: int, kv_context: str, epoch: int) -> None:
        """Add a session; it has no room yet.

        Raises:
            ValueError: the session is open already, or a value is out of range.
        """
        if session in self._sessions:
            raise ValueError(f"session {session} is open already; close it first")
        if steps < 1:
            raise ValueError(f"steps is {steps}; at least 1 is needed")
        limit = in_flight_limit(kv_context, steps=steps, stages=self.stages)
        self._sessions[session] = _Session(steps, kv_context, epoch, limit)

    def close(self, session: int) -> None:
        """Drop a session and what it has in flight; micro-steps that still come back are ignored."""
        self._sessions.pop(session, None)

    def reset(self, session: int, epoch: int) -> None:
        """Forget what is in flight and start again at chunk 0."""
        state = self._sessions[session]
        state.chunks.clear()
        state.next_chunk, state.epoch, state.room = 0, epoch, 0

    def set_epoch(self, session: int, epoch: int) -> None:
        """Chunks admitted from now on belong to `epoch`."""
        self._sessions[session].epoch = epoch

    def next_chunk(self, session: int) -> int:
        """Number of the chunk that is admitted next."""
        return self._sessions[session].next_chunk

    def oldest_epoch(self, session: int) -> int:
        """The oldest epoch that a chunk in flight still needs."""
        state = self._sessions[session]
        return min([chunk.epoch for chunk in state.chunks], default=state.epoch)

    def set_paused(self, session: int, paused: bool) -> None:
        self._sessions[session].paused = paused

    def set_room(self, session: int, frames: int) -> None:
        """How many more frames may be admitted now; admitting a chunk uses up `chunk_frames` of it."""
        self._sessions[session].room = frames

    @property
    def in_flight(self) -> int:
        """Micro-steps that entered the ring and have not come back."""
        return sum(chunk.entered - chunk.back for state in self._sessions.values() for chunk in state.chunks)

    def next(self) -> list[MicroStep]:
        """The rows of the next forward, at most `max_rows`, possibly none. They count as entered.

        Oldest chunk first within a session; between sessions, the one with the most room (the least playout slack).
        A chunk gives at most one row, since its next step needs this one's result.
        """
        rows: list[MicroStep] = []
        while len(rows) < self.max_rows and (row := self._pick(rows)):
            rows.append(row)
        return rows

    def returned(self, row: MicroStep) -> None:
        """A micro-step's result has come back to the head. Results of closed or reset streams are ignored."""
        state = self._sessions.get(row.session)
        chunk = (
            next((c for c in state.chunks if (c.number, c.epoch) == (row.chunk, row.epoch)), None) if state else None
        )
        if state is None or chunk is None or chunk.back != row.step - 1 or chunk.entered < row.step:
            return
        chunk.back = row.step
        while state.chunks and state.chunks[0].back == state.passes - 1:
            state.chunks.pop(0)

    @property
    def has_work(self) -> bool:
        """Whether `next` would hand out anything."""
        return self._find([]) is not None

    def _pick(self, taken: list[MicroStep]) -> MicroStep | None:
        found = self._find(taken)
        if found is None:
            return None
        name, chunk = found
        state = self._sessions[name]
        if chunk.number == state.next_chunk:
            self._admit(state, chunk)
        chunk.entered += 1
        return MicroStep(name, chunk.number, chunk.entered, state.steps, chunk.epoch)

    def _find(self, taken: list[MicroStep]) -> tuple[int, _Chunk] | None:
        """The session and chunk whose next micro-step is due, changing nothing."""
        order = sorted(self._sessions.items(), key=lambda item: (-item[1].room, item[0]))
        for name, state in order:
            busy = {row.chunk for row in taken if row.session == name}
            for chunk in self._candidates(state):
                if chunk.number not in busy and self._ready(state, chunk):
                    return name, chunk
        return None

    def _candidates(self, state: _Session) -> Iterator[_Chunk]:
        """Chunks in flight, oldest first, then the one that could be admitted."""
        if state.paused:
            return
        yield from list(state.chunks)
        if len(state.chunks) < state.in_flight_limit and state.room >= self.chunk_frames:
            yield _Chunk(state.next_chunk, state.epoch)

    def _admit(self, state: _Session, chunk: _Chunk) -> None:
        state.chunks.append(chunk)
        state.next_chunk += 1
        state.room -= self.chunk_frames

    def _ready(self, state: _Session, chunk: _Chunk) -> bool:
        """Rules 1 and 2 of DESIGN section 4 for the chunk's next step."""
        step = chunk.entered + 1
        if step >= state.passes or chunk.back != chunk.entered:
            return False
        before = next((c for c in state.chunks if c.number == chunk.number - 1), None)
        if before is not None:
            ahead = {"clean": state.steps, "staircase": step + 1, "matched": step}[state.kv_context]
            if before.entered < min(ahead, state.passes - 1):
                return False
        if state.kv_context == "staircase":
            # Chunk n + k reads this one's step s - 1 in its own step s - 1 - k: all of those enter before step s does.
            entered = {c.number: c.entered for c in state.chunks}
            return all(entered.get(chunk.number + k, -1) >= step - 1 - k for k in range(1, step))
        return True


def in_flight_limit(kv_context: str, *, steps: int, stages: int) -> int:
    """Chunks of one session that may be in flight at once.

    Raises:
        ValueError: unknown KV context.
    """
    if kv_context not in KV_CONTEXTS:
        raise ValueError(f"kv_context is {kv_context!r}; it can be {', '.join(KV_CONTEXTS)}")
    return {"clean": 1, "staircase": steps + 1, "matched": stages}[kv_context]


def minimum_lead(kv_context: str, *, steps: int, stages: int, chunk_frames: int) -> int:
    """Frames a viewer's lead must allow so that the ring can run: the chunks in flight and one being shown."""
    return chunk_frames * (in_flight_limit(kv_context, steps=steps, stages=stages) + 1)
