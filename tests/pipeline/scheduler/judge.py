"""A judge of the scheduler: the rules of docs/design.md, section 4, written down here once more, and a ring under
virtual time.

The judge keeps its own log and checks every micro-step that is handed out.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from streamdiff.core import MicroStep, in_flight_limit
from streamdiff.pipeline.scheduler.scheduler import PATIENCE, StreamBatchScheduler

FRAMES = 12


@cache
def timetable(stages: int, steps: int, chunks: int) -> tuple[int, ...]:
    """First tick of each chunk: one every `steps` ticks, later where a step would fall on a tick that is taken."""
    taken: set[int] = set()
    starts = []
    for chunk in range(chunks):
        start = chunk * steps
        while any(start + step * stages in taken for step in range(steps)):
            start += 1
        taken.update(start + step * stages for step in range(steps))
        starts.append(start)
    return tuple(starts)


@dataclass
class Log:
    """What the judge knows of one session. A first chunk has `extra` more steps than the others; steps are counted so
    that the last of every chunk is `steps` - 1, and the first chunk's first is below 0."""

    extra: int
    steps: int
    kv_context: str
    epoch: int
    stages: int
    room: int = 0
    paused: bool = False
    entered: dict[int, int] = field(default_factory=dict)  # chunk -> last step that entered
    back: dict[int, int] = field(default_factory=dict)  # chunk -> last step that came back
    epochs: dict[int, int] = field(default_factory=dict)  # chunk -> epoch at admission
    oldest: int = 0  # all chunks before it are finished
    rerun: list[int] = field(default_factory=list)  # chunks whose clean pass has to enter once more
    rerun_at: int = 0  # the first chunk after the latest rerun or change of steps: it finds everything finished
    then: tuple[int, int] | None = None  # steps, and more of a first chunk, that hold when nothing is in flight
    bounds: dict[int, int] = field(default_factory=dict)  # chunk -> that chunk, at admission

    @property
    def passes(self) -> int:
        return self.steps if self.paced else self.steps + 1

    @property
    def paced(self) -> bool:
        return self.kv_context == "same_step"

    @property
    def flight(self) -> list[int]:
        while self.back.get(self.oldest, self.before(self.oldest)) == self.passes - 1:
            self.oldest += 1
        return [c for c in range(self.oldest, len(self.entered)) if self.back.get(c, self.before(c)) < self.passes - 1]

    def before(self, chunk: int) -> int:
        """The number before that of the chunk's first step."""
        return -1 - (self.extra if chunk == 0 else 0)

    def at(self, chunk: int) -> int:
        return self.entered.get(chunk, self.before(chunk))

    def may_enter(self, chunk: int, step: int) -> bool:
        """The rules for micro-step (chunk, step), from the log alone."""
        if (
            self.paused
            or step > self.passes - 1
            or step != self.at(chunk) + 1
            or self.back.get(chunk, self.before(chunk)) != step - 1
        ):
            return False
        if step == self.before(chunk) + 1:
            limit = {"clean": 1, "staircase": self.steps + 1}.get(self.kv_context, self.stages)
            made = [c for c in self.flight if not self.paced or self.back.get(c, self.before(c)) < self.steps - 1]
            oldest = min(made, default=chunk)
            if self.rerun or self.then or self.room < FRAMES or chunk != len(self.entered) or chunk - oldest >= limit:
                return False
            if self.paced and not all(
                self.stands(c, self.at(c) + 1) > self.stands(chunk, 0)
                for c in self.flight
                if self.at(c) < self.passes - 1
            ):
                return False
        if chunk > 0:
            needed = {"clean": self.steps, "staircase": step + 1}.get(self.kv_context, step)
            if self.at(chunk - 1) < min(needed, self.passes - 1):
                return False
        if self.kv_context == "staircase":  # whoever sees this chunk at step - 1 must have done so
            last = len(self.entered) if self.rerun or self.then else chunk + step  # after that nobody comes who would
            return all(
                self.at(other) >= step - 1 - (other - chunk) for other in range(chunk + 1, min(last, chunk + step))
            )
        return True

    def change_steps(self) -> None:
        """Nothing is in flight: steps are counted anew, so that the last of every chunk has the new number."""
        assert self.then is not None and not self.flight
        steps, self.extra = self.then
        for known in (self.entered, self.back):
            known.update({chunk: step + steps - self.steps for chunk, step in known.items()})
        self.steps, self.then, self.rerun_at = steps, None, len(self.entered)

    def may_rerun(self) -> bool:
        """Whether a clean pass may enter once more: when every step that could read the old keys has entered."""
        return bool(self.rerun) and not self.paused and all(self.at(c) == self.passes - 1 for c in self.flight)

    def ready(self) -> list[tuple[int, int]]:
        """(chunk, step) of all that may enter now, in the order in which they should."""
        if self.may_rerun():
            return [(self.rerun[0], self.steps)]
        waiting = [(chunk, self.at(chunk) + 1) for chunk in [*self.flight, len(self.entered)]]
        ready = [(chunk, step) for chunk, step in waiting if self.may_enter(chunk, step)]
        return sorted(ready, key=lambda row: self.stands(*row)) if self.paced else ready

    def stands(self, chunk: int, step: int) -> int:
        """Tick of a micro-step in the timetable of a `same_step` session."""
        rounds, place = divmod(chunk, self.stages)
        starts = timetable(self.stages, self.steps, self.stages)
        return (rounds * self.steps + step) * self.stages + starts[place]

    def sees_what_its_context_says(self, chunk: int, step: int) -> bool:
        """At the moment (chunk, step) enters, every earlier chunk's keys are those that its context defines."""
        past = range(max(0, chunk - 2 * self.passes), chunk)
        if self.kv_context == "clean":
            return all(self.back[c] == self.steps for c in past)
        if self.paced:
            return all(self.at(c) >= min(step, self.steps - 1) for c in past)
        return all(
            self.at(c) == (self.steps if c < self.bounds[chunk] else min(step + chunk - c, self.steps)) for c in past
        )


class Judge:
    """A scheduler, the ring behind it, and a log of everything."""

    def __init__(self, stages: int, max_rows: int) -> None:
        self.scheduler = StreamBatchScheduler(stages=stages, chunk_frames=FRAMES, max_rows=max_rows)
        self.stages, self.max_rows = stages, max_rows
        self.logs: dict[int, Log] = {}
        self.ring: deque[MicroStep] = deque()
        self.epoch = 0
        self.waited: dict[int, int] = {}  # session -> forwards that passed it over although it had a row
        self.most_open = 0

    def open(self, session: int, steps: int, kv_context: str, extra: int = 0) -> None:
        self.epoch += 1
        first = steps + extra if extra else None
        self.scheduler.open(session, steps=steps, first_steps=first, kv_context=kv_context, epoch=self.epoch)
        self.logs[session] = Log(extra, steps, kv_context, self.epoch, self.stages)
        self.most_open = max(self.most_open, len(self.logs))

    def close(self, session: int) -> None:
        self.scheduler.close(session)
        self.waited.pop(session, None)
        del self.logs[session]

    def reset(self, session: int) -> None:
        self.epoch += 1
        self.scheduler.reset(session, self.epoch)
        old = self.logs[session]
        again = Log(
            old.extra, old.steps, old.kv_context, self.epoch, self.stages,
            paused=old.paused, then=old.then,
        )  # fmt: skip
        self.logs[session] = again
        self._settle()

    def change_steps(self, session: int, steps: int, extra: int = 0) -> None:
        """They hold as soon as nothing of the session is in flight."""
        self.scheduler.drain(session)
        self.logs[session].then = (steps, extra)
        self._settle()

    def _settle(self) -> None:
        for name, log in self.logs.items():
            drained = not log.flight and not log.rerun
            assert self.scheduler.drained(name) == drained
            if log.then is not None and drained:
                steps, extra = log.then
                self.scheduler.set_steps(name, steps=steps, first_steps=steps + extra)
                log.change_steps()

    def change_prompt(self, session: int) -> None:
        self.epoch += 1
        self.scheduler.set_epoch(session, self.epoch)
        self.logs[session].epoch = self.epoch
        oldest = min([self.logs[session].epochs[c] for c in self.logs[session].flight], default=self.epoch)
        assert self.scheduler.oldest_epoch(session) == oldest

    def rerun(self, session: int) -> None:
        """A new prompt under which the clean passes of the last three chunks run again."""
        log = self.logs[session]
        if log.paced:  # without a clean pass
            return
        self.change_prompt(session)
        log.rerun, log.rerun_at = list(range(max(0, len(log.entered) - 3), len(log.entered))), len(log.entered)
        self.scheduler.rerun(session, log.rerun)

    def set_frame_credit(self, session: int, frames: int) -> None:
        self.scheduler.set_frame_credit(session, frames)
        self.logs[session].room = frames

    def set_paused(self, session: int, paused: bool) -> None:
        self.scheduler.set_paused(session, paused)
        self.logs[session].paused = paused

    def forward(self) -> list[MicroStep]:
        """Ask for the next rows and check each against the rules."""
        self._settle()
        ready = {name for name, log in self.logs.items() if log.ready()}
        assert self.scheduler.has_work == bool(ready), "work-conserving: rows exactly when the rules allow one"
        rows = self.scheduler.next()
        assert bool(rows) == bool(ready)
        assert len(rows) <= self.max_rows
        assert len({(row.session, row.chunk) for row in rows}) == len(rows), "one row per chunk and forward"
        for row in rows:
            self._entered(row)
        assert all(self.scheduler.next_chunk(name) == len(log.entered) for name, log in self.logs.items())
        if len(rows) < self.max_rows:
            taken = {(row.session, row.chunk) for row in rows}
            left = {(name, log.ready()[0][0]) for name, log in self.logs.items() if log.ready()}
            assert left <= taken, "no row is left out while there is place, but for a chunk that has one already"
        self._nobody_starves(ready - {row.session for row in rows})
        self.ring.extend(rows)
        assert self.scheduler.in_flight == sum(
            log.at(c) - log.back.get(c, log.before(c)) for log in self.logs.values() for c in log.flight
        )
        return rows

    def _nobody_starves(self, passed_over: set[int]) -> None:
        self.waited = {name: self.waited.get(name, 0) + 1 for name in passed_over}
        assert all(wait < (PATIENCE + 1) * self.most_open for wait in self.waited.values()), self.waited

    def _entered(self, row: MicroStep) -> None:
        log = self.logs[row.session]
        extra = log.extra if row.chunk == 0 else 0
        step = row.step - extra
        assert row.steps == log.steps + extra
        if log.may_rerun():
            assert (row.chunk, step, row.epoch) == (log.rerun.pop(0), log.steps, log.epoch), row
            return
        assert log.may_enter(row.chunk, step), row
        assert log.ready()[0] == (row.chunk, step), "a session's rows enter in its order"
        log.bounds.setdefault(row.chunk, log.rerun_at)
        assert log.sees_what_its_context_says(row.chunk, step), row
        if row.step == 0:
            assert row.epoch == log.epoch
            log.room -= FRAMES
            log.epochs[row.chunk] = row.epoch
        assert row.epoch == log.epochs[row.chunk], "all steps of a chunk use one prompt"
        before = range(log.oldest, row.chunk)
        assert all(log.at(c) >= min(step, log.passes - 1) for c in before), "order is kept within a session"
        log.entered[row.chunk] = step
        made = [c for c in log.flight if not log.paced or log.back.get(c, log.before(c)) < log.steps - 1]
        assert len(made) <= in_flight_limit(log.kv_context, steps=log.steps, stages=self.stages)

    def come_back(self) -> None:
        """The oldest micro-step leaves the ring."""
        if not self.ring:
            return
        row = self.ring.popleft()
        self.scheduler.returned(row)
        log = self.logs.get(row.session)
        if log is not None and log.epochs.get(row.chunk) == row.epoch:
            log.back[row.chunk] = row.step - (log.extra if row.chunk == 0 else 0)


class VirtualRing:
    """A judge's rows in a ring of stages that take `ticks[p]` ticks each, one forward at a time, with free links.

    The head asks for a forward as soon as stage 0 is idle, or, `ahead`, while less than P + 1 forwards are in the ring.
    It learns nothing else: no tick passes unless a stage ends or a result comes back.
    """

    def __init__(self, judge: Judge, ticks: Sequence[int], *, ahead: bool = False) -> None:
        self.judge, self.ticks, self.ahead = judge, ticks, ahead
        self.now = self.in_ring = 0
        self.admitted: dict[tuple[int, int], int] = {}
        self.finished: dict[int, list[int]] = defaultdict(list)
        self.latencies: dict[int, list[int]] = defaultdict(list)
        self._free = [0] * len(ticks)
        self._events: list[tuple[int, int]] = [(0, 0)]  # (tick, rows that come back then)

    def run(self, done: Callable[[], bool], rooms: Callable[[], None]) -> None:
        """Until `done`; `rooms` is called before anything is asked for."""
        while not done():
            assert self._events, "the ring stands still"
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                self._take_back(heapq.heappop(self._events)[1])
            rooms()
            while self._may_ask() and (rows := self.judge.forward()):
                self._enter(rows)

    def wake(self, tick: int) -> None:
        """Something happens outside the ring at `tick`."""
        heapq.heappush(self._events, (tick, 0))

    def _may_ask(self) -> bool:
        return self.in_ring <= len(self.ticks) if self.ahead else self._free[0] <= self.now

    def _enter(self, rows: list[MicroStep]) -> None:
        self.in_ring += 1
        for row in rows:
            if row.step == 0:
                self.admitted[row.session, row.chunk] = self.now
        end = self.now
        for stage, ticks in enumerate(self.ticks):
            end = self._free[stage] = max(end, self._free[stage]) + ticks
            if stage == 0:
                self.wake(end)
        heapq.heappush(self._events, (end, len(rows)))

    def _take_back(self, count: int) -> None:
        self.in_ring -= bool(count)
        for _ in range(count):
            row = self.judge.ring[0]
            self.judge.come_back()
            if row.last:
                self.finished[row.session].append(self.now)
                self.latencies[row.session].append(self.now - self.admitted[row.session, row.chunk])
