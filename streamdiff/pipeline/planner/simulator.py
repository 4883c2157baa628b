"""The ring under virtual time: the real scheduler, with stages, links and a decoder that only take time; and a run as a
Chrome/Perfetto trace and as a plot.

Reads no clock and computes no tensor, so a run is exact and repeats itself. Not modelled: the two slots of a link (a
stage never waits for a free slot behind it; that would not change which stage is the slowest), and the transfer of
finished latents to a decoder on another rank.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

from streamdiff.atomic_write import temporary_sibling
from streamdiff.core import MicroStep, min_ahead_frames
from streamdiff.errors import ConfigError
from streamdiff.heavy_import import optional
from streamdiff.pipeline.scheduler.row_limit import RingSlots
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler

# Time inside is whole picoseconds: what happens together in exact arithmetic happens together here, whatever floats do.
PER_SECOND = 10**12
PICTURES = (".png", ".svg", ".pdf")
# Beyond this many whole rounds of the ring bars are thinner than their text.
_PLOTTED_CHUNKS = 8


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
    nothing, as with one stage, which has none.
    `decode_s`: a chunk's decode, on stage `decode_stage`, or beside the stages when that is None (its own rank or
    stream). Decodes run one at a time, in the order in which the chunks were finished.
    `forwards`: forwards in the ring at once, at most; None is one more than there are stages, so that one waits.
    `chunks`: how many chunks to finish per session, on average.
    """

    stage_s: tuple[tuple[float, ...], ...]
    streams: tuple[Stream, ...]
    link_s: tuple[float, ...] = ()
    decode_s: float = 0.0
    decode_stage: int | None = None
    max_rows: int = 1
    forwards: int | None = None
    chunks: int = 100


@dataclass(frozen=True)
class WorkSpan:
    """A forward on a stage, or a decode, on a stage or beside them (`stage` None). `rows` are (session, chunk, step);
    a decode's step is None."""

    stage: int | None
    begin_s: float
    end_s: float
    rows: tuple[tuple[int, int, int | None], ...]

    @property
    def is_decode(self) -> bool:
        return self.rows[0][2] is None

    @property
    def label(self) -> str:
        """As in `session 0 chunk 3 step 1`; `decode` in place of a step."""
        return " + ".join(
            f"session {session} chunk {chunk} " + ("decode" if step is None else f"step {step}")
            for session, chunk, step in self.rows
        )


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


class Done(NamedTuple):
    """A chunk's life: admitted (its first step entered the ring), finished (decoded)."""

    session: int
    chunk: int
    admitted_s: float
    finished_s: float


@dataclass(frozen=True)
class Run:
    """A finished simulation: jobs in order of their begin, chunks in order of their end."""

    jobs: tuple[WorkSpan, ...]
    chunks: tuple[Done, ...]
    figures: Figures


def simulate(setup: Setup) -> Run:
    """Run the scheduler over a ring of `setup`'s times, until each session has finished its chunks on average."""
    ring = _Ring(setup)
    ring.feed()
    while len(ring.done) < setup.chunks * len(setup.streams):
        if not ring.next_instant():
            raise RuntimeError(f"the ring stands still after {len(ring.done)} chunks")
        ring.feed()
    end_s = ring.now / PER_SECOND  # jobs that wait then are left out
    begun = (job for job in ring.jobs if job.begin_s <= end_s)
    jobs = sorted(begun, key=lambda job: (job.begin_s, -1 if job.stage is None else job.stage))
    return Run(tuple(jobs), tuple(ring.done), _figures(setup, jobs, ring.done))


class _Ring:
    """Stages, links and the decoder are FIFO queues, which do one job at a time."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.stages = setup, len(setup.stage_s)
        self.limit = setup.forwards or self.stages + 1
        # A chunk counts as one frame: frame credits are then in chunks.
        self.scheduler = StreamBatchScheduler(stages=self.stages, chunk_frames=1, max_rows=setup.max_rows)
        self.scheduler.set_row_costs(max(setup.stage_s, key=lambda times: times[0]))
        self.may_admit = []  # chunks of each session, until others are finished
        for number, stream in enumerate(setup.streams):
            steps, first, context = stream.steps, stream.first_steps, stream.kv_context
            self.scheduler.open(number, steps=steps, first_steps=first, kv_context=context, epoch=0)
            least = min_ahead_frames(context, steps=steps, stages=self.stages, chunk_frames=1)
            # One more is being decoded: without it a decode of half a forward costs `same_step` 6 % of its throughput.
            self.may_admit.append(least + 1)
        self.now = 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []  # a heap, by time and order of their notes
        self.noted = count()
        self.free_at: dict[str, int] = {}  # when each stage, link and the decoder has done what is queued
        self.in_ring = 0
        self.admitted: dict[tuple[int, int], int] = {}
        self.jobs: list[WorkSpan] = []
        self.done: list[Done] = []

    def feed(self) -> None:
        """Let forwards enter the ring while fewer than `limit` are in it. Mutates: self."""
        for number, chunks in enumerate(self.may_admit):
            self.scheduler.set_frame_credit(number, chunks)
        while (free := self.limit - self.in_ring) > 0:
            rows = self.scheduler.next(slots=RingSlots(free, free, self.limit))
            if not rows:
                return
            for row in rows:
                if row.step == 0:
                    self.admitted[row.session, row.chunk] = self.now
                    self.may_admit[row.session] -= 1
            self.in_ring += 1
            self._compute(0, rows)

    def next_instant(self) -> bool:
        """Run all events of the next instant, in the order in which they were noted; False when there are none.
        Mutates: self."""
        if not self.events:
            return False
        self.now = self.events[0][0]
        while self.events and self.events[0][0] == self.now:
            heapq.heappop(self.events)[2]()
        return True

    def _put(self, queue: str, seconds: float, ended: Callable[[], None]) -> tuple[int, int]:
        """Enqueue a job; returns when it begins and ends. `ended` is called at its end. Mutates: self."""
        begin = max(self.now, self.free_at.get(queue, 0))
        end = self.free_at[queue] = begin + _ticks(seconds)
        heapq.heappush(self.events, (end, next(self.noted), ended))
        return begin, end

    def _compute(self, stage: int, rows: Sequence[MicroStep]) -> None:
        """A forward has come to a stage. Mutates: self."""
        seconds = self.setup.stage_s[stage][len(rows) - 1]
        times = self._put(f"stage {stage}", seconds, partial(self._send, stage, rows))
        self._note(stage, times, [(row.session, row.chunk, row.step) for row in rows])

    def _send(self, stage: int, rows: Sequence[MicroStep]) -> None:
        last = stage == self.stages - 1
        received = partial(self._returned, rows) if last else partial(self._compute, stage + 1, rows)
        self._put(f"link {stage}", self.setup.link_s[stage] if self.setup.link_s else 0.0, received)

    def _returned(self, rows: Sequence[MicroStep]) -> None:
        """A forward has come back to rank 0. Mutates: self."""
        self.in_ring -= 1
        for row in rows:
            self.scheduler.returned(row)
            if row.last and _ticks(self.setup.decode_s):
                where = self.setup.decode_stage
                decoder = "decoder" if where is None else f"stage {where}"
                times = self._put(decoder, self.setup.decode_s, partial(self._finish, row))
                self._note(where, times, [(row.session, row.chunk, None)])
            elif row.last:  # nothing to wait for, not even for a busy stage
                self._finish(row)

    def _finish(self, row: MicroStep) -> None:
        admitted = self.admitted.pop((row.session, row.chunk))
        self.done.append(Done(row.session, row.chunk, admitted / PER_SECOND, self.now / PER_SECOND))
        self.may_admit[row.session] += 1

    def _note(self, stage: int | None, times: tuple[int, int], rows: list[tuple[int, int, int | None]]) -> None:
        begin, end = times
        self.jobs.append(WorkSpan(stage, begin / PER_SECOND, end / PER_SECOND, tuple(rows)))


def _figures(setup: Setup, jobs: Sequence[WorkSpan], done: Sequence[Done]) -> Figures:
    begin_s, end_s = done[len(done) // 4].finished_s, done[-1].finished_s
    window_s = end_s - begin_s
    steady = [each for each in done if begin_s < each.finished_s]
    latencies = [each.finished_s - each.admitted_s for each in steady]
    finished = [[each.finished_s for each in done if each.session == n] for n in range(len(setup.streams))]

    def busy(stage: int | None) -> float:
        own = (job for job in jobs if job.stage == stage)
        return sum(max(0.0, min(job.end_s, end_s) - max(job.begin_s, begin_s)) for job in own) / window_s

    def gaps(times: Sequence[float]) -> Gaps:
        """One that finished less than two chunks in the window has one gap: all of it."""
        found = [later - earlier for earlier, later in pairwise(times) if earlier >= begin_s] or [window_s]
        return Gaps(sum(found) / len(found), max(found))

    forwards = [len(job.rows) for job in jobs if job.stage == 0 and not job.is_decode]
    return Figures(
        # The slope: a count over a window would depend on where its edges fall among chunks that finish in bursts.
        chunks_per_s=linear_regression([each.finished_s for each in steady], range(len(steady))).slope,
        latency_s=sum(latencies) / len(latencies),
        longest_latency_s=max(latencies),
        first_chunk_s=max((times[0] if times else end_s) for times in finished),
        second_chunk_s=max((times[1] if len(times) > 1 else end_s) for times in finished),
        gaps=tuple(map(gaps, finished)),
        occupancy=tuple(map(busy, range(len(setup.stage_s)))),
        decode_occupancy=busy(None),
        rows_per_forward=sum(forwards) / len(forwards),
    )


def _ticks(seconds: float) -> int:
    return round(seconds * PER_SECOND)


# ---- traces and plots ------------------------------------------------------------------------------------------


def tracks(jobs: Sequence[WorkSpan], stages: int) -> list[tuple[int, WorkSpan]]:
    """The jobs in order of track and begin: tracks 0 to `stages` - 1, then one for decoding. A decode that keeps a
    stage busy stands on both."""
    found = [(stages if job.stage is None else job.stage, job) for job in jobs]
    found += [(stages, job) for job in jobs if job.is_decode and job.stage is not None]
    return sorted(found, key=lambda placed: (placed[0], placed[1].begin_s))


def _names(stages: int) -> list[str]:
    return [*(f"stage {number}" for number in range(stages)), "decode"]


def write_trace(path: Path, jobs: Sequence[WorkSpan], stages: int) -> None:
    """Write JSON for chrome://tracing or ui.perfetto.dev, times in microseconds, to `path`, which is replaced only by a
    complete file. Raises OSError."""
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
        for track, name in enumerate(_names(stages))
    ]
    for track, job in tracks(jobs, stages):
        rows = [{"session": s, "chunk": c, "step": "decode" if step is None else step} for s, c, step in job.rows]
        times = {"ts": job.begin_s * 1e6, "dur": (job.end_s - job.begin_s) * 1e6}
        events.append({"name": job.label, "ph": "X", "pid": 0, "tid": track, **times, "args": {"rows": rows}})
    with _replacing(path) as place:
        place.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8")


def check_plot(path: Path) -> None:
    """Raises ConfigError when no picture can be drawn to `path`: unknown ending of its name, or no matplotlib."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot is {str(path)!r}, but must end in {', '.join(PICTURES)}", field="plot")
    optional("matplotlib", "plot", "--plot", "plot")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` once it is whole; `path` itself where that is no file that could be
    replaced, as /dev/stdout. A link keeps pointing to where it does."""
    if path.exists() and not path.is_file():
        yield path
        return
    with temporary_sibling(path.resolve()) as temporary:
        yield temporary
        os.replace(temporary, path.resolve())


def write_plot(path: Path, jobs: Sequence[WorkSpan], stages: int) -> None:
    """Draw the first chunks of a run to `path`: one line per track, one colour per chunk, the step's number inside. It
    is replaced only by a complete file.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    found = tracks([job for job in jobs if any(chunk < _PLOTTED_CHUNKS for _, chunk, _ in job.rows)], stages)
    end_s = max(job.end_s for _, job in found)
    figure = Figure(figsize=(16, 1.5 + 0.6 * (stages + 1)), layout="constrained")
    axes = figure.subplots()
    for track, job in found:
        session, chunk, step = job.rows[0]
        width_s = job.end_s - job.begin_s
        colour = colormaps["tab10"]((chunk + 3 * session) % 10)
        axes.barh(track, width_s, left=job.begin_s, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
        if width_s > end_s / 120:
            word = "d" if step is None else f"{step}"
            axes.text(job.begin_s + width_s / 2, track, word, ha="center", va="center")
    axes.set_yticks(range(stages + 1), _names(stages))
    axes.set_ylim(stages + 0.5, -0.5)  # the first stage on top
    axes.set_xlim(0, end_s)
    axes.set_xlabel(f"seconds; chunks 0 to {_PLOTTED_CHUNKS - 1}, a colour per chunk, the step's number inside")
    with _replacing(path) as place:
        figure.savefig(place, format=path.suffix[1:])
