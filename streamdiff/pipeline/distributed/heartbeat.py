"""Rank health: sends heartbeats over the store, detects dead or hung ranks, and reports the first fault.

A thread of each rank writes a heartbeat into the ring's store twice a second. Ranks wait for each other as they start,
so one that stands still holds up all: it is the one that is least far, which every rank finds with the same result.
Afterwards each rank looks at its own loops, and at the next rank's heartbeat. The first fault that any rank detects is
kept in the store, where all ranks read it and end. So a ring ends as a whole, within a bounded time, with one message.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from tqdm import tqdm

from streamdiff import clock
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.link import GroupBroken, LinkClosed, Receiver, Sender, ring_edges
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.distributed.rendezvous import RankContext

logger = logging.getLogger(__name__)

EXIT_FAULT = 1
HEARTBEAT_S = 0.5
LEAVE_S = 5.0
"""How long ranks wait for each other when they end."""
_SILENT_S = 8 * HEARTBEAT_S
_HOST = socket.gethostname()


PHASES = {"weights": 240.0, "communicators": 120.0, "first transfers": 120.0, "graphs": 1800.0, "ready": float("inf")}
"""What comes after the rendezvous, in order, and how many seconds a rank may spend there without getting on. A single
graph of a large model takes minutes. The warm-up follows, which `model.watchdog_s` bounds. All end before anyone who
waits for the engine process (`engine.process.engine_process`) loses patience, who knows no rank."""


@dataclass(frozen=True)
class Heartbeat:
    """One heartbeat of a rank: `number` counts heartbeats; `host` and `pid` identify the process. At the start it is in
    `phase`, at `edge` within communicators and first transfers, and has `made` graphs; then `done` counts the messages
    executed, `where` is what the rank is executing, `at_s` its own clock and `busy_s` its device's busy time."""

    number: int = 0
    host: str = ""
    pid: int = 0
    phase: str = next(iter(PHASES))
    edge: int = 0
    made: int = 0
    at_s: float = 0.0
    done: int = 0
    busy_s: float = 0.0
    where: str = ""
    ended: bool = False

    @property
    def position(self) -> tuple[int, int]:
        """How far the start is."""
        return list(PHASES).index(self.phase), self.edge


class RankLoop(ABC):
    """A loop of a rank over the messages of a link: `pipeline.runner.model_runner.Worker`, or
    `pipeline.decode.decode_worker.DecodeWorker`.

    `now` is the message being executed and `last` the one before; error messages read them, from any thread. `done`
    counts messages. `timer` is that of the device.
    """

    def __init__(self, receiver: Receiver, sender: Sender, timer: DeviceTimer) -> None:
        self.receiver, self.sender, self.timer = receiver, sender, timer
        self.now: StageMessage | None = None
        self.last: StageMessage | None = None
        self.done = 0

    @property
    def awaits_others(self) -> bool:
        """Whether other ranks share each forward, so that a slow one may be their fault."""
        return False

    @abstractmethod
    def run(self) -> None:
        """Loop until the ring is stopped, then close the links. Mutates: everything. Raises LinkClosed where another
        rank is gone."""

    @abstractmethod
    def where(self) -> str:
        """What is being executed, for error messages."""

    def close_links(self) -> None:
        """Nothing more is sent or received; wait at most `LEAVE_S` for the other ends, each."""
        self.sender.close()
        self.receiver.close(LEAVE_S)
        self.sender.flush(LEAVE_S)


class Stillness:
    """For how long values have stayed the same."""

    def __init__(self) -> None:
        self._since: dict[object, tuple[object, float]] = {}

    def seconds(self, key: object, value: object, now_s: float, should_change: bool = True) -> float:
        """Note a value; returns for how many seconds it has been the same while it should change. Mutates: self."""
        if key not in self._since or self._since[key][0] != value or not should_change:
            self._since[key] = value, now_s
        return now_s - self._since[key][1]


def await_that(holds: Callable[[], bool], limit_s: float) -> None:
    """Wait until it holds, at most `limit_s`, by looking often."""
    end_s = clock.monotonic_s() + limit_s
    while not holds() and clock.monotonic_s() < end_s:
        threading.Event().wait(HEARTBEAT_S / 10)


class RankWatch:
    """One rank's heartbeats, and what it finds of itself and others, from the rendezvous on. Rank 0, also where it is
    alone (`context` is None), draws a bar of all ranks' graphs on stderr.

    `on_fault` is called from its thread, once, with the fault that ends the ring; at first it ends the process, as the
    rank's own thread may be what hangs."""

    def __init__(self, context: RankContext | None, stages: int = 1, shares: int = 1) -> None:
        """`stages` that `shares` ranks share each. Where there are several ranks, a thread watches until `finish`."""
        self.context, self._stages, self._shares = context, stages, shares
        self.on_fault: Callable[[str], None] = self._exit
        self._now = Heartbeat(host=_HOST, pid=os.getpid())
        self._workers: Sequence[RankLoop] = ()
        self._watchdog_s = float("inf")
        self._still, self._sending = Stillness(), threading.Lock()
        self._bar: tqdm[NoReturn] | None = None
        self._ended = threading.Event()
        if context is not None:
            # A connection of its own: the other one is taken as long as this rank waits for a key.
            self._ring = replace(context, store=context.store.clone())  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    # ---- the start ----------------------------------------------------------------------------------------------

    def enter(self, phase: str, edge: int = 0) -> None:
        """Report that this rank begins a phase, or an edge in it; at once, as it may hang in it. Mutates: self, the
        store."""
        if self.context is not None and self.context.rank == 0 and phase != self._now.phase:
            logger.info("the ring starts: %s", phase)
        self._send(phase=phase, edge=edge)

    def report_graphs(self, made: int, of: int) -> None:
        """This rank has graphs of `made` kinds of forward, of `of`, the same on all ranks. Mutates: self, the store."""
        self._send(made=made)
        if self._bar is None and (self.context is None or self.context.rank == 0):
            self._bar = tqdm(total=of * self._stages * self._shares, desc="compiling", unit="graph", dynamic_ncols=True)
        self._draw()

    def ready(self) -> None:
        """Wait until all ranks are ready, so that nothing is sent to one that still compiles. Once per ring. It polls,
        so that signals are handled. Mutates: self."""
        self.enter("ready")
        if self.context is not None:
            self.context.meet(self._draw)

    def _draw(self) -> None:
        """Show what all ranks together have made so far, if it is more than before. Mutates: self."""
        if self._bar is None:
            return
        made = self._now.made if self.context is None else sum(beat.made for beat in self.heartbeats())
        if made > self._bar.n:
            self._bar.update(made - self._bar.n)
            self._bar.refresh()
            if made == self._bar.total:
                self._bar.close()

    # ---- the loops ----------------------------------------------------------------------------------------------

    def begin(self, workers: Sequence[RankLoop], watchdog_s: float) -> None:
        """Watch the loops of this rank, at least one, which have one timer, that of the rank's device. `watchdog_s` is
        how long a forward may take, on the host and on the device, and how long a rank may be silent. Mutates: self."""
        self._watchdog_s, self._workers = watchdog_s, workers
        self._send()

    def finish(self) -> None:
        """The rank ends in order. Mutates: the store, with a last beat."""
        self._ended.set()
        self._thread.join()
        self._send(ended=True)

    def report(self, fault: str) -> str:
        """Report a fault to all ranks; returns the first one reported by any."""
        return self._ring.report_fault(fault)

    def fault(self, wait_s: float = 0.0) -> str | None:
        """The fault that ends the ring, if there is one; waits up to `wait_s` for it."""
        await_that(lambda: self._ring.fault() is not None, wait_s)
        return self._ring.fault()

    def where(self) -> str:
        """What this rank is executing, for error messages."""
        return ", ".join(worker.where() for worker in self._workers)

    def heartbeat(self, rank: int) -> Heartbeat:
        """The last beat of a rank."""
        key = f"beat/{rank}"
        return Heartbeat(**json.loads(self._ring.store.get(key))) if self._ring.store.check([key]) else Heartbeat()

    def heartbeats(self) -> list[Heartbeat]:
        """The last beat of each rank."""
        return [self.heartbeat(rank) for rank in range(self._ring.ranks)]

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that send no heartbeat within `_SILENT_S`; returns early if all do, or at a fault."""
        known = {rank: self.heartbeat(rank) for rank in ranks}

        def left() -> list[int]:
            return [rank for rank in ranks if self.heartbeat(rank) == known[rank]]

        await_that(lambda: not left() or self.fault() is not None, _SILENT_S)
        return left()

    def _send(self, **changes: Any) -> None:
        """Send a heartbeat, with these changes of the one before. Mutates: self, the store."""
        busy_s, done = self._workers[0].timer.busy_s if self._workers else 0.0, sum(each.done for each in self._workers)
        with self._sending:  # the rank's own thread sends too
            number = self._now.number + 1
            now = replace(self._now, number=number, at_s=clock.monotonic_s(), done=done, busy_s=busy_s)
            self._now = replace(now, where=self.where(), **changes)
            if self.context is not None:
                self._ring.store.set(f"beat/{self._ring.rank}", json.dumps(asdict(self._now)))

    def _run(self) -> None:
        parent = os.getppid()
        try:
            while not self._ended.wait(HEARTBEAT_S):
                self._send()
                found = self._hang() if self._workers else self._start_hang()
                if found is not None:
                    self.report(found)
                fault = self.fault() if os.getppid() == parent else "the launcher of the ranks is gone"
                if fault is not None:
                    self.on_fault(fault)
                    return
        except RuntimeError as error:  # the store's server is gone, and the launcher with it
            self.on_fault(f"the launcher of the ranks is gone: {error}")

    def _start_hang(self) -> str | None:
        return held_up(self.heartbeats(), ring_edges(self._stages, self._shares), self._still, clock.monotonic_s())

    def _hang(self) -> str | None:
        """What stands still of this rank or the next one, which is ended."""
        now_s, limit_s, rank = clock.monotonic_s(), self._watchdog_s, self._ring.rank
        for index, worker in enumerate(self._workers):
            still_s = self._still.seconds(
                ("loop", index), (worker.done, worker.now is None), now_s, worker.now is not None
            )
            # Of ranks that wait for each other in a forward, the one that says nothing is found first.
            if still_s >= (2 if worker.awaits_others else 1) * limit_s:
                return f"rank {rank} hangs: {limit_s:g} s {worker.where()}"
        if (stuck := self._workers[0].timer.stuck(now_s, limit_s)) is not None:
            return f"rank {rank} hangs: {stuck}"
        after = (rank + 1) % self._ring.ranks
        beat = self.heartbeat(after)
        if self._still.seconds("next", beat.number, now_s, not beat.ended) < limit_s:
            return None
        fault = self.report(f"rank {after} hangs: silent for {limit_s:g} s {beat.where}")
        if beat.host == _HOST:  # it cannot end by itself
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)
        return fault

    def _exit(self, fault: str) -> None:
        exit_now(f"rank {self._ring.rank} ends: {fault}")


def held_up(beats: Sequence[Heartbeat], edges: Sequence[tuple[int, int]], still: Stillness, now_s: float) -> str | None:
    """Which of the ranks stands still at the start and where, once it has lasted longer than the phase allows. Mutates:
    still."""
    same_s = [still.seconds(rank, (beat.position, beat.made), now_s) for rank, beat in enumerate(beats)]
    silent_s = [still.seconds(("silent", rank), beat.number, now_s) for rank, beat in enumerate(beats)]
    least = min(beat.position for beat in beats)
    behind = [rank for rank, beat in enumerate(beats) if beat.position == least]
    limit_s = PHASES[phase := beats[behind[0]].phase]
    if any(same_s[rank] < limit_s for rank in behind):
        return None
    silent = [rank for rank in behind if silent_s[rank] >= limit_s / 2]
    where = phase
    if phase in ("communicators", "first transfers"):
        source, target = edges[least[1]]
        where += f", edge {least[1]} from rank {source} to rank {target}"
    ranks = f"rank {', '.join(map(str, silent or behind))}{' says nothing and' if silent else ''}"
    return f"{ranks} does not get on in the start's phase {where}: {limit_s:g} s without progress"


def link_fault(error: LinkClosed, rank: int, worker: RankLoop | RankWatch, watch: RankWatch) -> str:
    """The fault that a closed link means, as `rank` reports it. Where an exchange among several ranks ended it is asked
    which of them still say something."""
    peers = watch.silent(error.peers) or error.peers if isinstance(error, GroupBroken) else (error.peer,)
    return f"rank {', '.join(map(str, peers))} is gone ({error}); rank {rank} noticed it {worker.where()}"


def exit_now(message: str | None = None) -> None:
    """End the process at once: its posted receives would abort the interpreter."""
    if message is not None:
        print(f"streamdiff: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAULT)
