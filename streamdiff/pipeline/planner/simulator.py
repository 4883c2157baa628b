"""The ring under virtual time: the real scheduler, with stages, links and a decoder that only take time.

Reads no clock and computes no tensor, so a run is exact and repeats itself. Not modelled: the two slots of a link (a
stage never waits for a free slot behind it; that would not change which stage is the slowest), and the transfer of
finished latents to a decoder on another rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import linear_regression

from streamdiff.core import MicroStep, min_ahead_frames
from streamdiff.errors import ConfigError
from streamdiff.pipeline.scheduler.row_limit import RingSlots
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler

# Time inside is whole picoseconds: what happens together in exact arithmetic happens together here, whatever floats do.
PER_SECOND = 10**12


@dataclass(frozen=True)
class Stream:
    """A session to simulate, whose chunks are taken away as soon as they are finished.

    `first_steps`: steps of the first chunk, where it has more.
    """

    steps: int
    kv_context: str
    first_steps: int | None = None


@dataclass(frozen=True)
class Setup:
    """What is simulated; times in seconds.

    `stage_s[p][r - 1]`: stage p on a forward of r rows, above 0, for every r up to `max_rows`.
    `link_s[p]`: a message from stage p to the next; the last one is the flow's way back to rank 0. Empty: links cost
    nothing. One stage has no links, and its entry must be 0 or missing.
    `decode_s`: a chunk's decode, on stage `decode_stage`, or beside the stages when that is None (its own rank or
    stream). Decodes run one at a time, in the order in which the chunks were finished.
    `forwards`: forwards in the ring at once, at most; None is one more than there are stages, so that one waits.
    `chunks`: how many chunks to finish per session, on average.

    Raises:
        ConfigError: a time that cannot be, or a first chunk with fewer steps.
    """

    stage_s: tuple[tuple[float, ...], ...]
    streams: tuple[Stream, ...]
    link_s: tuple[float, ...] = ()
    decode_s: float = 0.0
    decode_stage: int | None = None
    max_rows: int = 1
    forwards: int | None = None
    chunks: int = 100

    def __post_init__(self) -> None:
        for number, times in enumerate(self.stage_s):
            for time_s in times:
                _check(0 < time_s < math.inf, f"the time of stage {number} is {time_s:g} s; it must be above 0")
        for time_s in (*self.link_s, self.decode_s):
            _check(0 <= time_s < math.inf, f"a link or decode time is {time_s:g} s; it must be 0 or more")
        for stream in self.streams:
            first = stream.first_steps
            _check(
                first is None or first >= stream.steps, f"first_steps is {first}; at least {stream.steps} are needed"
            )


@dataclass(frozen=True)
class Span:
    """One row of a forward on a stage, or a decode. `step` is None for a decode, `stage` is None where that runs beside
    the stages.

    The rows of one forward have the same `forward`, begin and end; a decode has -1.
    """

    stage: int | None
    begin_s: float
    end_s: float
    session: int
    chunk: int
    step: int | None
    forward: int


@dataclass(frozen=True)
class Done:
    """A chunk's life: admitted (its first step entered the ring), finished (decoded)."""

    session: int
    chunk: int
    admitted_s: float
    finished_s: float


@dataclass(frozen=True)
class Gaps:
    """Seconds between a session's finished chunks."""

    mean_s: float
    longest_s: float


@dataclass(frozen=True)
class Figures:
    """Results of a simulation. Rates, latency, gaps and occupancy are of the steady state: the first quarter of the
    chunks is left out.

    `first_chunk_s` and `second_chunk_s` are from the start, of the session that waits longest. `occupancy` is the share
    of time in which a stage works, decodes on it included; `decode_occupancy` that of a decoder beside the stages.
    """

    chunks_per_s: float
    latency_s: float
    longest_latency_s: float
    first_chunk_s: float
    second_chunk_s: float
    gaps: tuple[Gaps, ...]
    occupancy: tuple[float, ...]
    decode_occupancy: float
    rows_per_forward: float


@dataclass(frozen=True)
class Run:
    """A finished simulation: spans in order of their begin, chunks in order of their end."""

    spans: tuple[Span, ...]
    chunks: tuple[Done, ...]
    figures: Figures


def simulate(setup: Setup) -> Run:
    """Run the scheduler over a ring of `setup`'s times."""
    ring = _Ring(setup)
    ring.run()
    end_s = ring.agenda.now / PER_SECOND  # jobs that wait then are left out
    begun = (span for span in ring.spans if span.begin_s <= end_s)
    spans = sorted(begun, key=lambda span: (span.begin_s, -1 if span.stage is None else span.stage))
    return Run(tuple(spans), tuple(ring.done), _figures(setup, spans, ring.done))


class Agenda:
    """Event queue; events of the same instant run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._noted = 0

    def at(self, time: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, self._noted, call))
        self._noted += 1

    def instant(self) -> bool:
        """Run all events of the next instant; False when there are none. Mutates: self."""
        if not self._heap:
            return False
        self.now = self._heap[0][0]
        while self._heap and self._heap[0][0] == self.now:
            heapq.heappop(self._heap)[2]()
        return True


class Server:
    """A stage, a link or a decoder: a FIFO queue that does one job at a time."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda, self._free = agenda, 0

    def put(self, ticks: int, ended: Callable[[], None]) -> tuple[int, int]:
        """Enqueue a job of `ticks`; returns when it begins and ends. `ended` is called at its end. Mutates: self,
        agenda."""
        begin = max(self._agenda.now, self._free)
        self._free = begin + ticks
        self._agenda.at(self._free, ended)
        return begin, self._free


class _Ring:
    def __init__(self, setup: Setup) -> None:
        self.setup, self.stages = setup, len(setup.stage_s)
        self.limit = setup.forwards or self.stages + 1
        # A chunk counts as one frame: frame credits are then in chunks.
        self.scheduler = StreamBatchScheduler(stages=self.stages, chunk_frames=1, max_rows=setup.max_rows)
        self.scheduler.set_row_costs(max(setup.stage_s, key=lambda times: times[0]))
        self.max_ahead = []
        for number, stream in enumerate(setup.streams):
            steps, first, context = stream.steps, stream.first_steps, stream.kv_context
            self.scheduler.open(number, steps=steps, first_steps=first, kv_context=context, epoch=0)
            least = min_ahead_frames(context, steps=steps, stages=self.stages, chunk_frames=1)
            # One more is being decoded: without it a decode of half a forward costs `same_step` 6 % of its throughput.
            self.max_ahead.append(least + 1)
        self.agenda = Agenda()
        self.stage = [Server(self.agenda) for _ in range(self.stages)]
        self.link = [Server(self.agenda) for _ in range(self.stages)]
        self.decoder = Server(self.agenda) if setup.decode_stage is None else self.stage[setup.decode_stage]
        self.in_ring = self.forwards = 0
        self.admitted: dict[tuple[int, int], int] = {}
        self.ahead = [0] * len(setup.streams)  # chunks admitted and not finished
        self.spans: list[Span] = []
        self.done: list[Done] = []

    def run(self) -> None:
        """Run until the horizon. Mutates: self."""
        horizon = self.setup.chunks * len(self.setup.streams)
        self._feed()
        while len(self.done) < horizon:
            if not self.agenda.instant():
                raise RuntimeError(f"the ring stands still after {len(self.done)} chunks")
            self._feed()

    def _feed(self) -> None:
        """Let forwards enter the ring while fewer than `limit` are in it. Mutates: self."""
        for number, max_ahead in enumerate(self.max_ahead):
            self.scheduler.set_frame_credit(number, max_ahead - self.ahead[number])
        while self.in_ring < self.limit and (
            rows := self.scheduler.next(
                slots=RingSlots(self.limit - self.in_ring, self.limit - self.in_ring, self.limit)
            )
        ):
            for row in rows:
                if row.step == 0:
                    self.admitted[row.session, row.chunk] = self.agenda.now
                    self.ahead[row.session] += 1
            self.in_ring += 1
            self._arrive(0, rows, self.forwards)
            self.forwards += 1

    def _arrive(self, stage: int, rows: Sequence[MicroStep], forward: int) -> None:
        ticks = _ticks(self.setup.stage_s[stage][len(rows) - 1])
        times = self.stage[stage].put(ticks, partial(self._send, stage, rows, forward))
        for row in rows:
            self._note(stage, times, row, row.step, forward)

    def _send(self, stage: int, rows: Sequence[MicroStep], forward: int) -> None:
        last = stage == self.stages - 1
        received = partial(self._back, rows) if last else partial(self._arrive, stage + 1, rows, forward)
        ticks = _ticks(self.setup.link_s[stage]) if self.setup.link_s else 0
        self.link[stage].put(ticks, received)

    def _back(self, rows: Sequence[MicroStep]) -> None:
        """A forward has come back to rank 0. Mutates: self."""
        self.in_ring -= 1
        for row in rows:
            self.scheduler.returned(row)
            if row.last:
                self._decode(row)

    def _decode(self, row: MicroStep) -> None:
        ticks = _ticks(self.setup.decode_s)
        if ticks:
            times = self.decoder.put(ticks, partial(self._finish, row))
            self._note(self.setup.decode_stage, times, row, None, -1)
        else:  # nothing to wait for, not even for a busy stage
            self._finish(row)

    def _finish(self, row: MicroStep) -> None:
        admitted = self.admitted.pop((row.session, row.chunk))
        self.done.append(Done(row.session, row.chunk, admitted / PER_SECOND, self.agenda.now / PER_SECOND))
        self.ahead[row.session] -= 1

    def _note(self, stage: int | None, times: tuple[int, int], row: MicroStep, step: int | None, forward: int) -> None:
        begin_s, end_s = (time / PER_SECOND for time in times)
        self.spans.append(Span(stage, begin_s, end_s, row.session, row.chunk, step, forward))


def _figures(setup: Setup, spans: Sequence[Span], done: Sequence[Done]) -> Figures:
    begin_s, end_s = done[len(done) // 4].finished_s, done[-1].finished_s
    window_s = end_s - begin_s
    steady = [chunk for chunk in done if begin_s < chunk.finished_s]
    latencies = [chunk.finished_s - chunk.admitted_s for chunk in steady]
    finished = [[chunk.finished_s for chunk in done if chunk.session == n] for n in range(len(setup.streams))]
    stages: list[int | None] = [*range(len(setup.stage_s)), None]
    jobs = {(span.stage, span.begin_s, span.end_s) for span in spans}  # the rows of a forward are one job
    busy = {
        stage: sum(max(0.0, min(end, end_s) - max(begin, begin_s)) for s, begin, end in jobs if s == stage)
        for stage in stages
    }
    forwards = {span.forward for span in spans if span.stage == 0 and span.step is not None}
    rows = sum(span.stage == 0 and span.step is not None for span in spans)
    return Figures(
        chunks_per_s=_rate([chunk.finished_s for chunk in steady]),
        latency_s=sum(latencies) / len(latencies),
        longest_latency_s=max(latencies),
        first_chunk_s=max((times[0] if times else end_s) for times in finished),
        second_chunk_s=max((times[1] if len(times) > 1 else end_s) for times in finished),
        gaps=tuple(_gaps([time for time in times if time >= begin_s], window_s) for times in finished),
        occupancy=tuple(busy[stage] / window_s for stage in range(len(setup.stage_s))),
        decode_occupancy=busy[None] / window_s,
        rows_per_forward=rows / len(forwards),
    )


def _rate(times: Sequence[float]) -> float:
    """Chunks per second: the least-squares slope of the count over time. A plain count over a window would depend on
    where its edges fall among chunks that finish in bursts."""
    return linear_regression(times, range(len(times))).slope


def _gaps(times: Sequence[float], window_s: float) -> Gaps:
    """A session that finished less than two chunks in the window has one gap: all of it."""
    gaps = [later - earlier for earlier, later in pairwise(times)] or [window_s]
    return Gaps(sum(gaps) / len(gaps), max(gaps))


def _ticks(seconds: float) -> int:
    return round(seconds * PER_SECOND)


def _check(good: bool, message: str) -> None:
    if not good:
        raise ConfigError(message)
