"""Rank health: sends heartbeats over the store, detects dead or hung ranks, and reports the first fault.

A thread of each rank writes a heartbeat into the ring's store twice a second and reads that of the next rank. The first
fault that any rank detects is kept in the store, where all ranks read it and end. So a ring ends as a whole, within a
bounded time, with one message.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from streamdiff import clock
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.link import GroupBroken, LinkClosed, Receiver, Sender
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.distributed.rendezvous import RankContext

EXIT_FAULT = 1
HEARTBEAT_S = 0.5
LEAVE_S = 5.0
"""How long ranks wait for each other when they end."""
_SILENT_S = 8 * HEARTBEAT_S
_HOST = socket.gethostname()


@dataclass(frozen=True)
class Heartbeat:
    """One heartbeat of a rank: `number` counts heartbeats, `done` the messages executed; `where` is what the rank is
    executing, `at_s` its own clock, `busy_s` its device's busy time; `host` and `pid` identify the process."""

    number: int
    host: str
    pid: int
    at_s: float
    done: int
    busy_s: float
    where: str
    ended: bool = False


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


class HealthMonitor:
    """Sends one rank's heartbeats and checks the next rank's. `on_fault` is called from its thread, once, with the
    fault; `watchdog_s` is how long a forward may take, on the host and on the device, and how long a rank may be
    silent."""

    def __init__(
        self, context: RankContext, workers: Sequence[RankLoop], on_fault: Callable[[str], None], watchdog_s: float
    ) -> None:
        """`workers` are the loops of this rank, at least one; they have one timer, that of the rank's device."""
        self._context, self._workers, self._on_fault, self._watchdog_s = context, workers, on_fault, watchdog_s
        self._timer = workers[0].timer
        self._ended = threading.Event()
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin. The next rank must begin within `watchdog_s` too."""
        self._send_heartbeat()
        self._thread.start()

    def finish(self) -> None:
        """The rank ends in order. Mutates: the store, with a last beat."""
        self._ended.set()
        self._thread.join()
        self._send_heartbeat(ended=True)

    def fault(self, wait_s: float = 0.0) -> str | None:
        """The fault that ends the ring, if there is one; waits up to `wait_s` for it."""
        end_s = clock.monotonic_s() + wait_s
        while (fault := self._context.fault()) is None and clock.monotonic_s() < end_s:
            threading.Event().wait(HEARTBEAT_S / 10)
        return fault

    def where(self) -> str:
        """What this rank is executing, for error messages."""
        return ", ".join(worker.where() for worker in self._workers)

    def last_heartbeat(self, rank: int) -> Heartbeat | None:
        """The last beat of a rank, or None before its first."""
        key = f"beat/{rank}"
        if not self._context.store.check([key]):
            return None
        return Heartbeat(**json.loads(self._context.store.get(key)))

    def await_heartbeats(self, ranks: Sequence[int], limit_s: float, last: bool = False) -> list[int]:
        """Those of `ranks` that send no further heartbeat within `limit_s`, or with `last` not their last one; returns
        early if all do, or at a fault."""
        known, end_s = {rank: self.last_heartbeat(rank) for rank in ranks}, clock.monotonic_s() + limit_s

        def awaited(rank: int) -> bool:
            beat = self.last_heartbeat(rank)
            return (beat is None or not beat.ended) if last else beat == known[rank]

        while (left := list(filter(awaited, ranks))) and clock.monotonic_s() < end_s and self.fault() is None:
            threading.Event().wait(HEARTBEAT_S / 10)
        return left

    def _send_heartbeat(self, ended: bool = False) -> None:
        self._number += 1
        done, now_s = sum(worker.done for worker in self._workers), clock.monotonic_s()
        beat = Heartbeat(self._number, _HOST, os.getpid(), now_s, done, self._timer.busy_s, self.where(), ended)
        self._context.store.set(f"beat/{self._context.rank}", json.dumps(asdict(beat)))

    def _run(self) -> None:
        # Of ranks that wait for each other in a forward, the one that says nothing is found first.
        own = [(each, _Stillness((2 if each.awaits_others else 1) * self._watchdog_s)) for each in self._workers]
        other = _Stillness(self._watchdog_s)
        parent, report, rank = os.getppid(), self._context.report_fault, self._context.rank
        after = (rank + 1) % self._context.ranks
        try:
            while not self._ended.wait(HEARTBEAT_S):
                self._send_heartbeat()
                for worker, still in own:
                    if still.lasts((worker.done, worker.now is None), worker.now is not None):
                        self._context.report_fault(f"rank {rank} hangs: {self._watchdog_s:g} s {worker.where()}")
                if (stuck := self._timer.stuck(clock.monotonic_s(), self._watchdog_s)) is not None:
                    report(f"rank {rank} hangs: {stuck}")
                beat = self.last_heartbeat(after)
                if beat is not None and other.lasts(beat.number, not beat.ended):
                    report(f"rank {after} hangs: silent for {self._watchdog_s:g} s {beat.where}")
                    _kill(beat)
                fault = self.fault() if os.getppid() == parent else "the launcher of the ranks is gone"
                if fault is not None:
                    self._on_fault(fault)
                    return
        except RuntimeError as error:  # the store's server is gone, and the launcher with it
            self._on_fault(f"the launcher of the ranks is gone: {error}")


def link_fault(error: LinkClosed, rank: int, worker: RankLoop | HealthMonitor, monitor: HealthMonitor) -> str:
    """The fault that a closed link means, as `rank` reports it. Where an exchange among several ranks ended it is asked
    which of them still say something."""
    peers: Sequence[int | None] = (error.peer,)
    if isinstance(error, GroupBroken):
        peers = monitor.await_heartbeats(error.peers, _SILENT_S) or error.peers
    return f"rank {', '.join(map(str, peers))} is gone ({error}); rank {rank} noticed it {worker.where()}"


def exit_now(message: str | None = None) -> None:
    """End the process at once: its posted receives would abort the interpreter."""
    if message is not None:
        print(f"streamdiff: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def _kill(beat: Heartbeat) -> None:
    """End a rank that cannot end by itself, where it can be reached."""
    if beat.host == _HOST:
        with contextlib.suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGKILL)


class _Stillness:
    """Whether a value has stayed the same for too long while it should change."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._value: object = None
        self._since_s = clock.monotonic_s()

    def lasts(self, value: object, should_change: bool) -> bool:
        now_s = clock.monotonic_s()
        if value != self._value or not should_change:
            self._value, self._since_s = value, now_s
        return now_s - self._since_s >= self._limit_s
