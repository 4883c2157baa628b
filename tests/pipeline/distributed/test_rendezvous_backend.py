"""The stand-in for NCCL does what NCCL does: two communicators' ends in one process, a host for each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from tests.pipeline.distributed.rendezvous_backend import (
    STREAMS,
    Backend,
    ComputeStream,
    Event,
    Locked,
    Point,
    Stream,
    Work,
)

LIMIT_S = 120.0


def filled(value: int) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.uint8)


def communicators(capacity: int, *names: str) -> list[tuple[Backend, Backend]]:
    """Both ends of each."""
    store = HashStore()
    Backend.capacity = capacity

    def end(name: str, rank: int) -> Backend:
        return Backend(PrefixStore(name, store), store, rank, [0, 1], name)

    with ThreadPoolExecutor(2) as pool:  # both ends wait for each other
        pairs = [(pool.submit(end, name, 0), pool.submit(end, name, 1)) for name in names]
        return [(one.result(), other.result()) for one, other in pairs]


def beside(call: Callable[[], Work]) -> Future[Work]:
    """What another host does."""
    future: Future[Work] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Locked as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def connected(capacity: int) -> tuple[Backend, Backend]:
    ((sender, receiver),) = communicators(capacity, "edge")
    first = beside(lambda: sender.send([filled(0)], 1))
    assert receiver.recv([filled(9)], 0).end.wait(LIMIT_S) and first.result(LIMIT_S).end.wait(LIMIT_S)
    return sender, receiver


def test_the_first_use_waits_for_the_other_host() -> None:
    ((sender, receiver),) = communicators(4, "edge")
    first = beside(lambda: sender.send([filled(7)], 1))
    waiting = threading.Event()
    while not sender._everybody.check(["waits/0"]):
        waiting.wait(0.001)
    assert not first.done()
    got = filled(0)
    assert receiver.recv([got], 0).end.wait(LIMIT_S) and torch.equal(got, filled(7))
    assert first.result(LIMIT_S).end.wait(LIMIT_S)


def test_hosts_that_wait_in_a_circle_are_told() -> None:
    (one, _), (_, other) = communicators(4, "there", "back")
    first = beside(lambda: one.send([filled(1)], 1))
    with pytest.raises(Locked, match=r"there: send of rank 0; back: send of rank 1|back: .*; there: "):
        other.send([filled(1)], 0)
    with pytest.raises(Locked, match="each waits for the next"):
        first.result(LIMIT_S)


@pytest.mark.parametrize("capacity", [0, 1, 4])
def test_a_send_ends_when_it_is_matched_or_fits(capacity: int) -> None:
    sender, receiver = connected(capacity)
    sends = [sender.send([filled(number)], 1).end for number in range(capacity + 1)]
    assert all(end.wait(LIMIT_S) for end in sends[:-1])
    assert not sends[-1].wait(0.05), "it does not fit, and nobody has posted a receive"
    got = [filled(9) for _ in sends]
    assert all([receiver.recv([slot], 0).end.wait(LIMIT_S) for slot in got]) and sends[-1].wait(LIMIT_S)
    assert [int(slot[0]) for slot in got] == list(range(capacity + 1)), "in order"


def test_a_transfer_begins_after_what_was_current_when_it_was_issued() -> None:
    sender, receiver = connected(4)
    lane, before, slot = Stream(), Point("written"), filled(0)
    lane.wait_for([before])
    with STREAMS.use(lane):
        sent = sender.send([slot], 1).end
    slot.fill_(5)
    before.settle()
    got = filled(9)
    assert receiver.recv([got], 0).end.wait(LIMIT_S) and sent.wait(LIMIT_S) and torch.equal(got, filled(5))


def test_an_abort_ends_what_is_pending_and_only_the_next_operation_says_so() -> None:
    sender, receiver = connected(0)
    lane, sent, event = Stream(), sender.send([filled(1)], 1), Event()
    with STREAMS.use(lane):
        sent.wait()
    event.record(lane)
    assert not sent.end.passed
    sender.abort()
    event.synchronize()
    with pytest.raises(RuntimeError, match="aborted"):
        sender.send([filled(1)], 1)
    assert not receiver._aborted, "the peer hears nothing"


def test_what_cannot_come_leaves_the_device_stuck_and_the_host_free() -> None:
    """Nothing is raised, and what the device is given afterwards never runs."""
    receive, lane, event, compute = Point("receive"), Stream(), Event(), ComputeStream()
    lane.wait_for([receive])
    event.record(lane)
    receive.settle(lost=True)
    event.wait(compute)
    assert compute.points == [receive]
    with pytest.raises(Locked):
        event.synchronize()
