"""A server under load in virtual time: the scheduler, the playout buffer and the admission that `streamdiff serve` has,
and an engine that only takes time.

Not modelled: encoding, the network, connecting, and that decoding and stages share the cores of a small machine.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.arrivals import JobArrival, Visitor
from benchmarks.slo import Video, Visit
from streamdiff.pipeline.scheduler.kv_context import min_ahead_frames
from streamdiff.pipeline.scheduler.row_limit import RingSlots
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.server.jobs.runner import AHEAD_CHUNKS
from streamdiff.server.load.capacity import Capacity
from streamdiff.server.load.load_policy import UNLIMITED, LoadLimit, LoadPolicy, SessionDemand, least_share
from streamdiff.server.media.playout import PlayoutBuffer, PlayoutSlot

_DECIDE_S = 1.0
LOOK_S = 0.5
"""How often the count of frames shown is looked at, as the server tells it."""


@dataclass(frozen=True)
class EngineTimes:
    """What an engine takes, as measured: `forward_s[r - 1]` seconds for a forward of r rows through all blocks,
    `decode_s` for a chunk, `work_s` of work in a chunk, by which sessions are admitted. A chunk has `chunk_latents`
    latent frames, which are decoded one by one."""

    forward_s: tuple[float, ...]
    decode_s: float
    work_s: float
    chunk_frames: int
    chunk_latents: int
    steps: int
    kv_context: str
    steps_known: tuple[int, ...] = ()
    """Numbers of steps that the model has, which `adaptive` sessions may be lowered to."""


@dataclass(frozen=True)
class ServerSettings:
    """Of the server that is simulated: `stages` share a forward's time evenly, `max_rows` may share a forward, `lead_s`
    seconds of video are made ahead (what a session begins with), sessions may take `load_limit` of the engine's time,
    and are `adaptive` or not."""

    fps: float
    stages: int = 1
    max_rows: int = 1
    lead_s: float = 0.6
    load_limit: float = 10.0
    adaptive: bool = False


@dataclass(eq=False)
class _Live:
    """An open session and who watches it."""

    visit: Visit
    playout: PlayoutBuffer
    passed: int = 0  # frames that were shown
    made: int = 0  # frames that are decoded
    begun: int = 0  # frames of chunks that are admitted and not decoded yet
    epoch: int = 0
    asked: list[tuple[int, float]] = field(default_factory=list)  # epochs of prompts not seen yet, and when they came
    tick_s: float = math.inf  # when the buffer is asked next
    limit: LoadLimit = UNLIMITED
    new_steps: int | None = None  # once nothing is in flight any more


@dataclass(eq=False)
class _Job:
    video: Video
    frames: int
    made: int = 0
    begun: int = 0


class LoadSimulation:
    """One run. Deterministic; times in seconds from the run's beginning."""

    def __init__(self, times: EngineTimes, settings: ServerSettings) -> None:
        """Raises ValueError for more rows than there are times for."""
        if settings.max_rows > len(times.forward_s):
            raise ValueError(f"max_rows is {settings.max_rows}, but forwards have times up to {len(times.forward_s)}")
        self._times, self._settings, self.now_s = times, settings, 0.0
        stages = settings.stages
        self._limit = stages + 1 if stages > 1 else 1  # as RingExecutor has it
        self._scheduler = StreamBatchScheduler(
            stages=stages, chunk_frames=times.chunk_frames, max_rows=settings.max_rows
        )
        self._scheduler.set_row_costs(times.forward_s)
        self._policy = LoadPolicy(times.steps_known, settings.load_limit)
        self._capacity = Capacity(times.chunk_frames, times.steps, settings.load_limit, times.work_s)
        least = min_ahead_frames(times.kv_context, steps=times.steps, stages=stages, chunk_frames=times.chunk_frames)
        lead_frames = max(1, round(settings.lead_s * settings.fps))
        self._ahead_frames, self._start_frames = max(lead_frames, least), min(times.chunk_frames, lead_frames)
        self._jobs_at_once = stages if times.kv_context == "clean" else 1
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._noted = self._slots = 0
        self._stage_free_s = [0.0] * stages
        self._in_ring: list[Sequence[MicroStep]] = []
        self._live: dict[int, _Live] = {}
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._to_decode: tuple[deque[MicroStep], deque[MicroStep]] = (deque(), deque())  # of live sessions, of jobs
        self._decoding = False
        self.forwards: list[int] = []
        """Rows of every forward."""

    def run(self, visitors: Sequence[Visitor], jobs: Sequence[JobArrival]) -> tuple[list[Visit], list[Video]]:
        """Let them come, until the last visitor has left; what became of them, in the same order. Jobs that are not
        done then have no end."""
        visits = [Visit(each.at_s, each.leaves_s) for each in visitors]
        videos = [Video(each.at_s) for each in jobs]
        for visitor, visit in zip(visitors, visits, strict=True):
            self._at(visitor.at_s, partial(self._come, visitor, visit))
        for job, video in zip(jobs, videos, strict=True):
            frames = max(1, round(job.seconds * self._settings.fps))
            self._at(job.at_s, partial(self._ask, _Job(video, frames)))
        end_s = max((each.leaves_s for each in visitors), default=math.inf)
        if self._settings.adaptive:
            self._decide()
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] == self.now_s:
                heapq.heappop(self._agenda)[2]()
            self._feed()
        return visits, videos

    def _at(self, at_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, self._noted, call))
        self._noted += 1

    # ---- who comes and goes -------------------------------------------------------------------------------------

    def _come(self, visitor: Visitor, visit: Visit) -> None:
        share = least_share(self._demand, self._times.steps_known, self._share)
        if self._capacity.refusal([share] * len(self._live), share):
            visit.refused = "time"
            return
        slot, live = self._open(background=False), _Live(visit, self._playout())
        self._live[slot] = live
        for after_s in visitor.prompts_s:
            self._at(visitor.at_s + after_s, partial(self._say, slot))
        self._at(visitor.leaves_s, partial(self._leave, slot))

    @property
    def _demand(self) -> SessionDemand:
        """What every session asks for."""
        return SessionDemand(self._times.steps, self._settings.fps, self._settings.adaptive)

    def _share(self, fps: float, steps: int) -> float:
        return self._capacity.share(fps, self.now_s, steps)

    def _decide(self) -> None:
        """Ask the policy every second, as the server does, and let sessions have what it says."""
        demands = {str(slot): self._demand for slot in self._live}
        for name, limit in self._policy.decide(demands, self._share, self.now_s).items():
            live, steps = self._live[int(name)], self._times.steps
            if live.limit.rate != limit.rate:
                live.playout.set_fps(limit.fps_of(self._settings.fps))
                live.tick_s = math.inf
                self._tick(int(name))
            if live.limit.steps_of(steps) != limit.steps_of(steps):
                live.new_steps = limit.steps_of(steps)
                self._scheduler.drain(int(name))
            live.limit = limit
        self._at(self.now_s + _DECIDE_S, self._decide)

    def _playout(self) -> PlayoutBuffer:
        return PlayoutBuffer(self._settings.fps, start_frames=self._start_frames)

    def _open(self, *, background: bool) -> int:
        """A slot that no session had before, so that epochs may begin at 0."""
        slot, self._slots = self._slots, self._slots + 1
        times = self._times
        self._scheduler.open(slot, steps=times.steps, kv_context=times.kv_context, epoch=0, background=background)
        return slot

    def _say(self, slot: int) -> None:
        """Another prompt, which holds from the next chunk on."""
        live = self._live[slot]
        live.epoch += 1
        live.asked.append((live.epoch, self.now_s))
        self._scheduler.set_epoch(slot, live.epoch)

    def _leave(self, slot: int) -> None:
        live = self._live.pop(slot)
        live.visit.controls += [self.now_s - asked_s for _, asked_s in live.asked]
        self._scheduler.close(slot)

    def _ask(self, job: _Job) -> None:
        job.video.submit_s = 0.0
        self._waiting.append(job)
        self._begin_jobs()

    def _begin_jobs(self) -> None:
        while self._waiting and len(self._jobs) < self._jobs_at_once:
            self._jobs[self._open(background=True)] = self._waiting.popleft()

    # ---- the ring -----------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Let enter what may, as `InFlightQueue` does."""
        for slot, live in self._live.items():
            if live.new_steps is not None and self._scheduler.drained(slot):
                self._scheduler.set_steps(slot, steps=live.new_steps)
                live.new_steps = None
            ahead = live.made - live.passed + live.begun
            self._scheduler.set_frame_credit(slot, self._ahead_frames - ahead)
        for slot, job in self._jobs.items():
            left = job.frames + self._times.chunk_frames - 1 - job.made - job.begun
            # Its frames are encoded at once.
            self._scheduler.set_frame_credit(slot, min(AHEAD_CHUNKS * self._times.chunk_frames - job.begun, left))
        while len(self._in_ring) < self._limit and (rows := self._next_rows()):
            for row in rows:
                if row.step == 0:
                    self._stream(row).begun += self._times.chunk_frames
            self.forwards.append(len(rows))
            self._in_ring.append(rows)
            end_s, stage_s = self.now_s, self._times.forward_s[len(rows) - 1] / self._settings.stages
            for stage, free_s in enumerate(self._stage_free_s):  # a forward never overtakes another
                end_s = self._stage_free_s[stage] = max(end_s, free_s) + stage_s
            self._at(end_s, partial(self._back, rows))

    def _next_rows(self) -> list[MicroStep]:
        taken, slots = len(self._in_ring), None
        if self._settings.max_rows > 1:
            live = sum(not self._scheduler.is_background(rows) for rows in self._in_ring)
            slots = RingSlots(self._limit - taken, self._limit - live, self._limit)
        return self._scheduler.next(background=taken < self._settings.stages, slots=slots)

    def _stream(self, row: MicroStep) -> _Live | _Job:
        return self._live[row.session] if row.session in self._live else self._jobs[row.session]

    def _back(self, rows: Sequence[MicroStep]) -> None:
        self._in_ring.remove(rows)
        for row in rows:
            self._scheduler.returned(row)
            if row.last and (row.session in self._live or row.session in self._jobs):
                self._to_decode[row.session in self._jobs].append(row)
        self._decode()

    # ---- frames -------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Chunks are decoded one at a time, those of jobs when no other waits."""
        queue = self._to_decode[0] or self._to_decode[1]
        if self._decoding or not queue:
            return
        self._decoding, row, pieces = True, queue.popleft(), self._times.chunk_latents
        for piece in range(1, pieces + 1):
            at_s = self.now_s + self._times.decode_s * piece / pieces
            self._at(at_s, partial(self._deliver, row, piece == pieces))

    def _deliver(self, row: MicroStep, last: bool) -> None:
        frames = self._times.chunk_frames // self._times.chunk_latents
        if row.session in self._live:
            live, settings = self._live[row.session], self._settings
            if live.passed and live.made % self._times.chunk_frames == 0:
                fps = live.limit.fps_of(settings.fps)
                slack_s = (live.made - live.passed) / fps
                self._policy.chunk(str(row.session), slack_s, self._times.chunk_frames / fps, self.now_s)
            live.playout.push(live.made, np.zeros((frames, 1), np.uint8), epoch=row.epoch)
            live.made += frames
            live.begun -= frames
            self._tick(row.session)
        elif row.session in self._jobs:
            self._deliver_job(row.session, frames)
        if last:
            self._decoding = False
            self._decode()

    def _deliver_job(self, slot: int, frames: int) -> None:
        job = self._jobs[slot]
        job.made += frames
        job.begun -= frames
        if job.made >= job.frames:
            job.video.wait_s, job.video.download_s = self.now_s - job.video.at_s, 0.0
            del self._jobs[slot]
            self._scheduler.close(slot)
            self._begin_jobs()

    def _tick(self, slot: int) -> None:
        """Show what is due, and come back when more is; for an earlier time a later one is forgotten."""
        live = self._live.get(slot)
        if live is None:
            return
        if live.tick_s <= self.now_s:
            live.tick_s = math.inf
        while (due := live.playout.due(self.now_s)) is not None:
            if not due.repeated:
                self._shown(slot, live, due)
        next_s = live.playout.next_due_s
        # Time that is a sum of floats may fall a hair short of a slot's.
        if next_s is not None and (at_s := max(next_s, self.now_s + 1e-6)) < live.tick_s:
            live.tick_s = at_s
            self._at(at_s, partial(self._tick, slot))

    def _shown(self, slot: int, live: _Live, due: PlayoutSlot) -> None:
        live.passed = due.frame + 1
        if live.visit.first_frame_s is None:
            live.visit.first_frame_s = self.now_s - live.visit.at_s
            self._look(slot)
        live.visit.controls += [self.now_s - asked_s for epoch, asked_s in live.asked if epoch <= due.epoch]
        live.asked = [(epoch, asked_s) for epoch, asked_s in live.asked if epoch > due.epoch]

    def _look(self, slot: int) -> None:
        live = self._live.get(slot)
        if live is not None:
            live.visit.looks.append((self.now_s, live.passed))
            self._at(self.now_s + LOOK_S, partial(self._look, slot))
