"""Sessions that come and go, under virtual time: the real scheduler, the real policy of adaptive sessions, and viewers
who look at frames at the rate they are given. What the server does with clocks and sockets, exact and repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from streamdiff.core import MicroStep, min_ahead_frames
from streamdiff.pipeline.planner.simulator import PER_SECOND, Agenda, Server
from streamdiff.pipeline.scheduler.row_limit import RingSlots
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler
from streamdiff.server.load import UNLIMITED, Capacity, LoadLimit, LoadPolicy, ViewerDemand

LOOK_S = 1.0
"""How often the policy is asked where no chunk is finished."""


@dataclass(frozen=True)
class Visit:
    """A session that somebody watches for a while."""

    begin_s: float = 0.0
    end_s: float = float("inf")
    adaptive: bool = True
    steps: int = 4
    fps: float = 40.0
    kv_context: str = "clean"


@dataclass(frozen=True)
class Machine:
    """What sessions share. `forward_s`: seconds of a forward through all `stages`; from `slow_s[0]` to `slow_s[1]` it
    takes `slow` times as long, of which the measured cost of a chunk says nothing."""

    forward_s: float
    stages: int = 1
    chunk_frames: int = 12
    lead_s: float = 0.6
    steps_known: tuple[int, ...] = (4, 2)
    limit: float = 0.9
    slow: float = 1.0
    slow_s: tuple[float, float] = (0.0, 0.0)


@dataclass
class Viewing:
    """How a session was seen. `waits`: when its viewer waited for a chunk, and for how many seconds; `limits`: when it
    was limited, and to what; `chunks`: when each chunk was finished, and its steps."""

    waits: list[tuple[float, float]] = field(default_factory=list)
    limits: list[tuple[float, LoadLimit]] = field(default_factory=list)
    chunks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        return sum(wait_s for _, wait_s in self.waits)


@dataclass
class _Watched:
    """A session that is open. `until_s`: when its frames will have been shown; None before the first."""

    visit: Visit
    limit: LoadLimit = UNLIMITED
    until_s: float | None = None
    unfinished: int = 0
    new_steps: int | None = None
    wake_s: float = float("-inf")

    @property
    def fps(self) -> float:
        return self.limit.fps_of(self.visit.fps)

    def unshown(self, now_s: float) -> float:
        """Frames that wait to be shown."""
        return 0.0 if self.until_s is None else max(0.0, self.until_s - now_s) * self.fps


class _Site:
    """A ring, its sessions and their viewers."""

    def __init__(self, machine: Machine, visits: Sequence[Visit], end_s: float) -> None:
        self.machine, self.visits, self.end_s = machine, visits, end_s
        self.scheduler = StreamBatchScheduler(stages=machine.stages, chunk_frames=machine.chunk_frames)
        passes = 5  # of a chunk in the 4 steps of `Capacity`
        self.capacity = Capacity(machine.chunk_frames, 4, machine.limit, passes * machine.forward_s / machine.stages)
        self.policy = LoadPolicy(machine.steps_known, machine.limit)
        self.viewing = [Viewing() for _ in visits]
        self.open: dict[int, _Watched] = {}
        self.agenda = Agenda()
        self.stages = [Server(self.agenda) for _ in range(machine.stages)]
        self.places, self.in_ring = machine.stages + 1, 0
        for number, visit in enumerate(visits):
            self._at(visit.begin_s, partial(self._join, number))
            self._at(visit.end_s, partial(self._leave, number))
        for look in range(int(end_s / LOOK_S)):
            self._at(look * LOOK_S, self._decide)

    @property
    def now_s(self) -> float:
        return self.agenda.now / PER_SECOND

    def _at(self, at_s: float, call: Any) -> None:
        if at_s <= self.end_s:
            self.agenda.at(round(at_s * PER_SECOND), call)

    def run(self) -> list[Viewing]:
        """Run until the end. Mutates: self."""
        while self.now_s < self.end_s and self.agenda.instant():
            for number, watched in self.open.items():
                if watched.new_steps is not None and self.scheduler.drained(number):
                    self.scheduler.set_steps(number, steps=watched.new_steps)
                    watched.new_steps = None
            self._feed()
        return self.viewing

    def _join(self, number: int) -> None:
        visit = self.visits[number]
        self.scheduler.open(number, steps=visit.steps, kv_context=visit.kv_context, epoch=0)
        self.open[number] = _Watched(visit)
        self._decide()

    def _leave(self, number: int) -> None:
        self.scheduler.close(number)
        del self.open[number]
        self._decide()

    def _decide(self) -> None:
        """Ask the policy, and do what it says. Mutates: self."""
        visits = {str(number): each.visit for number, each in self.open.items()}
        demands = {name: ViewerDemand(visit.steps, visit.fps, visit.adaptive) for name, visit in visits.items()}
        share = partial(_share, self.capacity, self.now_s)
        for name, limit in self.policy.decide(demands, share, self.now_s).items():
            watched = self.open[int(name)]
            unshown, steps = watched.unshown(self.now_s), watched.limit.steps_of(watched.visit.steps)
            watched.limit = limit
            if watched.until_s is not None and unshown:
                watched.until_s = self.now_s + unshown / watched.fps
            if steps != limit.steps_of(watched.visit.steps):
                watched.new_steps = limit.steps_of(watched.visit.steps)
                self.scheduler.drain(int(name))
            self.viewing[int(name)].limits.append((self.now_s, limit))

    # ---- the ring -----------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        for number, watched in self.open.items():
            room, chunk_frames = self._room(watched), self.machine.chunk_frames
            self.scheduler.set_frame_credit(number, int(room - watched.unshown(self.now_s) + 1e-6))
            if watched.until_s is not None and room >= chunk_frames:  # when there is room for another chunk
                wake_s = watched.until_s - (room - chunk_frames) / watched.fps
                if wake_s > max(self.now_s, watched.wake_s) or watched.wake_s > wake_s > self.now_s:
                    watched.wake_s = wake_s
                    self._at(wake_s, lambda: None)
        free = self.places - self.in_ring
        while free and (rows := self.scheduler.next(slots=RingSlots(free, free, self.places))):
            for row in rows:
                self.open[row.session].unfinished += row.step == 0
            self.in_ring += 1
            self._arrive(0, rows)
            free -= 1

    def _room(self, watched: _Watched) -> int:
        """Frames that may be made beyond those shown and those under way."""
        machine, visit = self.machine, watched.visit
        sizes = {"stages": machine.stages, "chunk_frames": machine.chunk_frames}
        least = min_ahead_frames(visit.kv_context, steps=visit.steps, **sizes)
        return max(least, round(machine.lead_s * watched.fps)) - watched.unfinished * machine.chunk_frames

    def _arrive(self, stage: int, rows: Sequence[MicroStep]) -> None:
        machine = self.machine
        slow = machine.slow if machine.slow_s[0] <= self.now_s < machine.slow_s[1] else 1.0
        ticks = round(slow * machine.forward_s / machine.stages * PER_SECOND)
        after = partial(self._arrive, stage + 1, rows) if stage + 1 < machine.stages else partial(self._back, rows)
        self.stages[stage].put(ticks, after)

    def _back(self, rows: Sequence[MicroStep]) -> None:
        self.in_ring -= 1
        for row in rows:
            self.scheduler.returned(row)
            if row.last and row.session in self.open:
                self._finish(row)

    def _finish(self, row: MicroStep) -> None:
        """A chunk is there to be shown. Mutates: self."""
        watched, viewing, now_s = self.open[row.session], self.viewing[row.session], self.now_s
        watched.unfinished -= 1
        viewing.chunks.append((now_s, row.steps))
        chunk_s = self.machine.chunk_frames / watched.fps
        if watched.until_s is not None:
            slack_s = watched.until_s - now_s
            if slack_s < 0:
                viewing.waits.append((now_s, -slack_s))
            self.policy.chunk(str(row.session), slack_s, chunk_s, now_s)
        watched.until_s = max(watched.until_s or 0.0, now_s) + chunk_s
        self._decide()


def _share(capacity: Capacity, now_s: float, fps: float, steps: int) -> float:
    return capacity.share(fps, now_s, steps)


def simulate(machine: Machine, visits: Sequence[Visit], end_s: float) -> list[Viewing]:
    """How each visit was seen until `end_s`."""
    return _Site(machine, visits, end_s).run()


def doubling(sessions: int, begin_s: float, lasts_s: float, every_s: float = 0.25, **wish: Any) -> list[Visit]:
    """A load of `sessions` that doubles at `begin_s` for so many seconds, a session every `every_s`."""
    stay = Visit(**wish)
    late = [begin_s + number * every_s for number in range(sessions)]
    return [stay] * sessions + [replace(stay, begin_s=at_s, end_s=at_s + lasts_s) for at_s in late]
