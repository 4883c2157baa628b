"""Jobs take the forwards that live sessions leave, and nothing else: live timing is the same with and without them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamdiff.core import MicroStep, min_ahead_frames
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler

TICKS = 160
FIRST_JOB = 100
"""Number of the first job's session; live sessions count from 0."""


@dataclass(frozen=True)
class Live:
    """A live session: it shows a chunk every `show` ticks, begins at tick `begin`, and may be `more` chunks ahead
    beyond what its KV context needs. `changes` are (tick, what happens to it)."""

    steps: int
    kv_context: str
    begin: int
    show: int
    more: int
    changes: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Job:
    steps: int
    kv_context: str
    begin: int
    end: int


@dataclass
class Playing:
    """What one live session has done so far, in chunks."""

    max_ahead: int
    admitted: int = 0
    finished: int = 0
    shown: int = 0


@dataclass
class Ring:
    """A ring of stages that take one tick each: what enters comes back as many ticks later."""

    stages: int
    max_rows: int
    live: tuple[Live, ...]
    jobs: tuple[Job, ...]
    entered: list[tuple[int, list[MicroStep]]] = field(default_factory=list)

    def run(self) -> Ring:
        self.scheduler = StreamBatchScheduler(stages=self.stages, chunk_frames=1, max_rows=self.max_rows)
        self.playing: dict[int, Playing] = {}
        self.epoch = 0
        in_ring: deque[tuple[int, list[MicroStep]]] = deque()
        for tick in range(TICKS):
            while in_ring and in_ring[0][0] == tick:
                self._take_back(in_ring.popleft()[1])
            self._happen(tick)
            rows = self.scheduler.next(background=len(in_ring) < self.stages)
            if rows:
                self.entered.append((tick, rows))
                in_ring.append((tick + self.stages, rows))
                for row in rows:
                    if row.session in self.playing and row.step == 0:
                        self.playing[row.session].admitted += 1
        return self

    def _take_back(self, rows: list[MicroStep]) -> None:
        for row in rows:
            self.scheduler.returned(row)
            if row.last and row.session in self.playing:
                self.playing[row.session].finished += 1

    def _happen(self, tick: int) -> None:
        for name, live in enumerate(self.live):
            if tick == live.begin:
                self._open(name, live.steps, live.kv_context, background=False)
                least = min_ahead_frames(live.kv_context, steps=live.steps, stages=self.stages, chunk_frames=1)
                self.playing[name] = Playing(least + live.more)
            for when, what in live.changes:
                if tick == when and name in self.playing:
                    self._change(name, what)
            if (playing := self.playing.get(name)) is not None:
                playing.shown += tick % live.show == 0 and playing.finished > playing.shown
                self.scheduler.set_frame_credit(name, playing.max_ahead - (playing.admitted - playing.shown))
        for name, job in enumerate(self.jobs, FIRST_JOB):
            if tick == job.begin:
                self._open(name, job.steps, job.kv_context, background=True)
                self.scheduler.set_frame_credit(name, 1_000)
            elif tick == job.end:
                self.scheduler.close(name)

    def _open(self, name: int, steps: int, kv_context: str, background: bool) -> None:
        self.scheduler.open(name, steps=steps, kv_context=kv_context, epoch=0, background=background)

    def _change(self, name: int, what: str) -> None:
        if what == "close":
            self.scheduler.close(name)
            del self.playing[name]
        elif what == "reset":
            self.epoch += 1
            self.scheduler.reset(name, self.epoch)
            playing = self.playing[name]
            playing.admitted = playing.finished = playing.shown = 0
        else:
            self.scheduler.set_paused(name, what == "pause")

    @property
    def of_live(self) -> list[tuple[int, list[MicroStep]]]:
        """When which rows of live sessions entered."""
        return [(tick, rows) for tick, rows in self.entered if rows[0].session < FIRST_JOB]


contexts = st.sampled_from(("clean", "staircase", "same_step"))
changes = st.tuples(st.integers(0, TICKS), st.sampled_from(("pause", "resume", "reset", "close")))
lives = st.builds(
    Live,
    steps=st.integers(1, 4),
    kv_context=contexts,
    begin=st.integers(0, 40),
    show=st.integers(2, 30),
    more=st.integers(0, 3),
    changes=st.lists(changes, max_size=3).map(tuple),
)
jobs = st.builds(Job, st.integers(1, 4), contexts, st.integers(0, 60), st.integers(61, TICKS))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@example(  # who goes first in a forward of two is not to follow from what the job had before
    1, 2, (Live(1, "clean", 13, 2, 0, ()), Live(1, "clean", 14, 2, 0, ())), (Job(1, "clean", 0, 61),)
)  # fmt: skip
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(lives, min_size=1, max_size=4).map(tuple),
    st.lists(jobs, min_size=1, max_size=4).map(tuple),
)
def test_live_sessions_have_every_micro_step_on_the_same_tick_with_and_without_jobs(
    stages: int, max_rows: int, live: tuple[Live, ...], begun: tuple[Job, ...]
) -> None:
    alone = Ring(stages, max_rows, live, ()).run()
    beside = Ring(stages, max_rows, live, begun).run()
    assert beside.of_live == alone.of_live
    assert all(len({row.session < FIRST_JOB for row in rows}) == 1 for _, rows in beside.entered), "none is shared"


def test_jobs_leave_no_stage_idle_that_they_could_use() -> None:
    """Four stages, one live session that has a step in the ring at most: four jobs take every tick it does not."""
    live = Live(4, "clean", begin=0, show=40, more=1, changes=())
    begun = tuple(Job(4, "clean", begin=0, end=TICKS + 1) for _ in range(4))
    ring = Ring(4, 1, (live,), begun).run()
    assert [tick for tick, _ in ring.entered] == list(range(TICKS))
    rows = [row.session for _, rows in ring.entered for row in rows]
    shares = [rows.count(FIRST_JOB + number) for number in range(4)]
    assert min(shares) > 0.8 * max(shares), f"jobs take turns: {shares}"


def test_a_job_enters_only_where_a_stage_has_nothing_to_do() -> None:
    """With as many forwards in the ring as stages, a live session's goes in ahead; a job's waits."""
    scheduler = StreamBatchScheduler(stages=2, chunk_frames=1)
    scheduler.open(0, steps=2, kv_context="clean", epoch=0, background=True)
    scheduler.set_frame_credit(0, 5)
    assert scheduler.next(background=False) == []
    scheduler.open(1, steps=2, kv_context="clean", epoch=0)
    scheduler.set_frame_credit(1, 1)
    assert [row.session for row in scheduler.next(background=False)] == [1]
    assert [row.session for row in scheduler.next()] == [0]
