"""The scheduler against the rules of DESIGN section 4, written down here once more, under random histories.

A history is a list of events: time passes, results come back late, rooms change, sessions pause, change their prompt,
are reset and closed. A judge keeps its own log and checks every micro-step that is handed out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.pipeline.microstep import MicroStep
from streamdiff.pipeline.scheduler import KV_CONTEXTS, StreamBatchScheduler, in_flight_limit, minimum_lead

FRAMES = 12


@dataclass
class Log:
    """What the judge knows of one session."""

    steps: int
    kv_context: str
    epoch: int
    stages: int
    room: int = 0
    paused: bool = False
    entered: dict[int, int] = field(default_factory=dict)  # chunk -> last step that entered
    back: dict[int, int] = field(default_factory=dict)  # chunk -> last step that came back
    epochs: dict[int, int] = field(default_factory=dict)  # chunk -> epoch at admission

    @property
    def passes(self) -> int:
        return self.steps if self.kv_context == "matched" else self.steps + 1

    @property
    def flight(self) -> list[int]:
        return [c for c in self.entered if self.back.get(c, -1) < self.passes - 1]

    def at(self, chunk: int) -> int:
        return self.entered.get(chunk, -1)

    def may_enter(self, chunk: int, step: int) -> bool:
        """The rules for micro-step (chunk, step), from the log alone."""
        if self.paused or step >= self.passes or step != self.at(chunk) + 1 or self.back.get(chunk, -1) != step - 1:
            return False
        if step == 0:
            limit = {"clean": 1, "staircase": self.steps + 1, "matched": self.stages}[self.kv_context]
            oldest = min(self.flight, default=chunk)
            if self.room < FRAMES or chunk != len(self.entered) or chunk - oldest >= limit:
                return False
        if chunk > 0:
            needed = {"clean": self.steps, "staircase": min(step + 1, self.steps), "matched": step}[self.kv_context]
            if self.at(chunk - 1) < needed:
                return False
        if self.kv_context == "staircase":  # whoever sees this chunk at step - 1 must have done so
            return all(self.at(chunk + k) >= step - 1 - k for k in range(1, step))
        return True

    def anything_ready(self) -> bool:
        waiting = [*self.flight, len(self.entered)]
        return any(self.may_enter(chunk, self.at(chunk) + 1) for chunk in waiting)

    def sees_what_its_context_says(self, chunk: int, step: int) -> bool:
        """At the moment (chunk, step) enters, every earlier chunk's keys are those that its context defines."""
        past = range(max(0, chunk - 2 * self.passes), chunk)
        if self.kv_context == "clean":
            return all(self.back[c] == self.steps for c in past)
        if self.kv_context == "matched":
            return all(self.at(c) >= step for c in past)
        return all(self.at(c) == min(step + chunk - c, self.steps) for c in past)


class Judge:
    """A scheduler, the ring behind it, and a log of everything."""

    def __init__(self, stages: int, max_rows: int) -> None:
        self.scheduler = StreamBatchScheduler(stages=stages, chunk_frames=FRAMES, max_rows=max_rows)
        self.stages, self.max_rows = stages, max_rows
        self.logs: dict[int, Log] = {}
        self.ring: deque[MicroStep] = deque()
        self.epoch = 0

    def open(self, session: int, steps: int, kv_context: str) -> None:
        self.epoch += 1
        self.scheduler.open(session, steps=steps, kv_context=kv_context, epoch=self.epoch)
        self.logs[session] = Log(steps, kv_context, self.epoch, self.stages)

    def close(self, session: int) -> None:
        self.scheduler.close(session)
        del self.logs[session]

    def reset(self, session: int) -> None:
        self.epoch += 1
        self.scheduler.reset(session, self.epoch)
        old = self.logs[session]
        self.logs[session] = Log(old.steps, old.kv_context, self.epoch, self.stages, paused=old.paused)

    def change_prompt(self, session: int) -> None:
        self.epoch += 1
        self.scheduler.set_epoch(session, self.epoch)
        self.logs[session].epoch = self.epoch
        oldest = min([self.logs[session].epochs[c] for c in self.logs[session].flight], default=self.epoch)
        assert self.scheduler.oldest_epoch(session) == oldest

    def set_room(self, session: int, frames: int) -> None:
        self.scheduler.set_room(session, frames)
        self.logs[session].room = frames

    def set_paused(self, session: int, paused: bool) -> None:
        self.scheduler.set_paused(session, paused)
        self.logs[session].paused = paused

    def forward(self) -> list[MicroStep]:
        """Ask for the next rows and check each against the rules."""
        ready = any(log.anything_ready() for log in self.logs.values())
        assert self.scheduler.has_work == ready, "work-conserving: rows exactly when the rules allow one"
        rows = self.scheduler.next()
        assert bool(rows) == ready
        assert len(rows) <= self.max_rows
        assert len({(row.session, row.chunk) for row in rows}) == len(rows), "one row per chunk and forward"
        for row in rows:
            self._entered(row)
        assert all(self.scheduler.next_chunk(name) == len(log.entered) for name, log in self.logs.items())
        if len(rows) < self.max_rows:
            taken = {(row.session, row.chunk) for row in rows}
            left = [
                (name, chunk)
                for name, log in self.logs.items()
                for chunk in [*log.flight, len(log.entered)]
                if (name, chunk) not in taken and log.may_enter(chunk, log.at(chunk) + 1)
            ]
            assert not left, "work-conserving: no row is left out while there is place"
        self.ring.extend(rows)
        assert self.scheduler.in_flight == sum(
            log.at(c) - log.back.get(c, -1) for log in self.logs.values() for c in log.flight
        )
        return rows

    def _entered(self, row: MicroStep) -> None:
        log = self.logs[row.session]
        assert row.steps == log.steps
        assert log.may_enter(row.chunk, row.step), row
        assert log.sees_what_its_context_says(row.chunk, row.step), row
        if row.step == 0:
            assert row.epoch == log.epoch
            log.room -= FRAMES
            log.epochs[row.chunk] = row.epoch
        assert row.epoch == log.epochs[row.chunk], "all steps of a chunk use one prompt"
        assert all(log.at(c) >= row.step for c in range(row.chunk)), "order is kept within a session"
        log.entered[row.chunk] = row.step
        assert len(log.flight) <= in_flight_limit(log.kv_context, steps=log.steps, stages=self.stages)

    def come_back(self) -> None:
        """The oldest micro-step leaves the ring."""
        if not self.ring:
            return
        row = self.ring.popleft()
        self.scheduler.returned(row)
        log = self.logs.get(row.session)
        if log is not None and log.epochs.get(row.chunk) == row.epoch:
            log.back[row.chunk] = row.step


sessions = st.integers(0, 3)
events = st.one_of(
    st.just(("forward",)),
    st.just(("forward",)),
    st.just(("back",)),
    st.just(("turn",)),
    st.just(("turn",)),
    st.tuples(st.just("open"), sessions, st.integers(1, 5), st.sampled_from(KV_CONTEXTS)),
    st.tuples(st.just("room"), sessions, st.integers(-30, 60)),
    st.tuples(st.just("room"), sessions, st.just(200)),
    st.tuples(st.just("pause"), sessions, st.booleans()),
    st.tuples(st.just("prompt"), sessions),
    st.tuples(st.just("reset"), sessions),
    st.tuples(st.just("close"), sessions),
)


def play(judge: Judge, event: tuple[object, ...]) -> None:
    name, *rest = event
    if name == "forward":
        judge.forward()
    elif name == "back":
        judge.come_back()
    elif name == "turn":
        judge.forward()
        while judge.ring:
            judge.come_back()
    elif name == "open":
        session, steps, kv_context = rest
        if session not in judge.logs:
            judge.open(int(str(session)), int(str(steps)), str(kv_context))
    elif rest[0] in judge.logs:
        session = int(str(rest[0]))
        if name == "room":
            judge.set_room(session, int(str(rest[1])))
        elif name == "pause":
            judge.set_paused(session, bool(rest[1]))
        else:
            {"prompt": judge.change_prompt, "reset": judge.reset, "close": judge.close}[str(name)](session)


@settings(max_examples=150)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.lists(events, min_size=20, max_size=160))
def test_no_history_breaks_the_rules_and_everything_admitted_finishes(
    stages: int, max_rows: int, late: int, history: list[tuple[object, ...]]
) -> None:
    """After the history every session gets room and runs on, with results that come back up to `late` rows late."""
    judge = Judge(stages, max_rows)
    for event in history:
        play(judge, event)
    admitted = {name: len(log.entered) for name, log in judge.logs.items()}
    for name in judge.logs:
        judge.set_paused(name, False)
    for _ in range(1200):
        if all(log.back.get(admitted[name] + 1, -1) == log.passes - 1 for name, log in judge.logs.items()):
            return
        for name, log in judge.logs.items():
            judge.set_room(name, 200 if len(log.entered) < admitted[name] + 12 else 0)
        if len(judge.ring) > late or not judge.forward():
            judge.come_back()
    raise AssertionError("chunks that were admitted, or that there was room for, never finished")


@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
@pytest.mark.parametrize("stages", [1, 4])
def test_with_exactly_the_minimum_lead_the_ring_never_stands_still(kv_context: str, stages: int) -> None:
    """Frames are shown one by one; what is made and not shown stays within the lead."""
    judge = Judge(stages, 1)
    judge.open(0, 4, kv_context)
    lead = minimum_lead(kv_context, steps=4, stages=stages, chunk_frames=FRAMES)
    log, shown = judge.logs[0], 0
    for _ in range(6000):
        unshown = len(log.entered) * FRAMES - shown
        assert unshown <= lead
        judge.set_room(0, lead - unshown)
        if judge.forward():
            continue
        if judge.ring:
            judge.come_back()
        else:
            made = sum(1 for step in log.back.values() if step >= log.steps - 1) * FRAMES
            assert made > shown, "nothing runs and nothing is left to show"
            shown += 1
        if shown > 30 * FRAMES:
            return
    raise AssertionError("too slow")


def simulate(kv_context: str, sessions_count: int, stages: int, steps: int) -> tuple[float, list[int], int]:
    """Virtual time, one tick per stage: chunks per unit over all sessions, gaps of session 0, ticks to its first."""
    judge = Judge(stages, 1)
    for session in range(sessions_count):
        judge.open(session, steps, kv_context)
    finished: list[int] = []
    made = 0
    ticks = 400 * stages
    arrivals: deque[int] = deque()
    for tick in range(ticks):
        while arrivals and arrivals[0] == tick:
            arrivals.popleft()
            row = judge.ring[0]
            judge.come_back()
            if row.last:
                made += 1
                if row.session == 0:
                    finished.append(tick)
        for session in range(sessions_count):
            judge.set_room(session, 20 * FRAMES)
        if judge.forward():
            arrivals.append(tick + stages)
    gaps = [b - a for a, b in pairwise(finished)]
    return made / 400, gaps[len(gaps) // 2 :], finished[0]


def test_a_staircase_fills_the_ring_with_one_session() -> None:
    """P = S = 4: 0.8 chunks per unit, the ideal P / (S + 1), and every gap 1.25 units."""
    rate, gaps, first = simulate("staircase", 1, 4, 4)
    assert rate == pytest.approx(0.8, abs=0.02)
    assert set(gaps) == {5}
    assert first == 16, "the first chunk is ready after S units"


def test_matched_reaches_one_chunk_per_unit() -> None:
    rate, _, first = simulate("matched", 1, 4, 4)
    assert rate == pytest.approx(1.0, abs=0.02)
    assert first == 16


def test_clean_fills_the_ring_with_as_many_sessions_as_stages() -> None:
    assert simulate("clean", 4, 4, 4)[0] == pytest.approx(4 / 5, abs=0.02)
    assert simulate("clean", 1, 4, 4)[0] == pytest.approx(1 / 5, abs=0.02)


def test_the_session_with_the_least_slack_goes_first() -> None:
    judge = Judge(1, 1)
    for session, room in ((0, 24), (1, 96), (2, 48)):
        judge.open(session, 4, "clean")
        judge.set_room(session, room)
    assert [judge.forward()[0].session for _ in range(3)] == [1, 2, 0]


def test_results_of_a_stream_that_is_gone_are_ignored() -> None:
    judge = Judge(2, 1)
    judge.open(0, 4, "clean")
    judge.set_room(0, 100)
    stale = judge.forward()[0]
    judge.reset(0)
    judge.set_room(0, 100)
    fresh = judge.forward()[0]
    assert (stale.chunk, stale.step) == (fresh.chunk, fresh.step) == (0, 0)
    judge.come_back()  # the stale one
    assert judge.scheduler.in_flight == 1 and not judge.scheduler.has_work
    judge.come_back()
    assert judge.scheduler.has_work
    judge.scheduler.returned(fresh)  # a second time: no effect
    assert judge.forward()[0].step == 1
    judge.close(0)
    judge.scheduler.returned(fresh)
    assert judge.scheduler.in_flight == 0 and judge.scheduler.next() == []


def test_bad_values_are_refused_with_what_is_allowed() -> None:
    scheduler = StreamBatchScheduler(stages=1, chunk_frames=FRAMES)
    with pytest.raises(ValueError, match="'foggy'; it can be clean, staircase, matched"):
        scheduler.open(0, steps=4, kv_context="foggy", epoch=0)
    with pytest.raises(ValueError, match="steps is 0; at least 1"):
        scheduler.open(0, steps=0, kv_context="clean", epoch=0)
    scheduler.open(0, steps=4, kv_context="clean", epoch=0)
    with pytest.raises(ValueError, match="session 0 is open already"):
        scheduler.open(0, steps=4, kv_context="clean", epoch=1)
    assert not scheduler.has_work and scheduler.next() == []
