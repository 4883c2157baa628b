"""Rings of processes over a CPU stand-in for NCCL start, stream, pause and end, and nobody waits for ever.

What gloo lets pass locks here: the first use of an edge waits for the other host, a send for its receive. The stand-in
does what NCCL does."""

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
from tests.pipeline.distributed.rendezvous_ring import CHUNKS
from tests.pipeline.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rings over a transport like NCCL")]
LIMIT_S = 900.0  # ends what hangs; a busy machine takes minutes


RINGS = [3, *(pytest.param(stages, marks=pytest.mark.soak) for stages in (2, 4))]


@pytest.fixture(scope="module", params=RINGS)
def said(request: pytest.FixtureRequest) -> list[list[str]]:
    """What each rank of a ring of so many printed, by line."""
    lines = run_ranks("tests.pipeline.distributed.rendezvous_ring", [], request.param, LIMIT_S)
    return [text.splitlines() for text in lines]


def test_all_ranks_sending_first_or_receiving_first_lock(said: list[list[str]]) -> None:
    for rank, lines in enumerate(said):
        locked = [line for line in lines if line.startswith("locked: each waits for the next: ")]
        assert len(locked) == 2
        for line, role in zip(locked, ("send", "receive"), strict=True):
            assert line.count(f": {role} of rank ") == len(said), f"rank {rank}: all of them, around: {line}"


def test_edges_connect_whoever_comes_late(said: list[list[str]]) -> None:
    assert [lines[0] for lines in said] == ["connected 4 times"] * len(said)


def test_the_ring_streams_what_one_stage_streams(said: list[list[str]]) -> None:
    """Whether sends end early or when they are matched; through pauses, new prompts and a second session."""
    expected = [f"capacity {each}: [{n}, {n // 2}] chunks, same [True, True]" for each, n in CHUNKS.items()]
    assert [line for line in said[0] if line.startswith("capacity")] == expected


def test_all_others_end_when_a_rank_dies(said: list[list[str]]) -> None:
    """Nothing of NCCL says it; the records do."""
    for rank, lines in enumerate(said[:-1]):
        assert lines[-1].startswith("ended: the link with rank "), f"rank {rank}: {lines[-1]}"
    assert not said[-1][-1].startswith("ended")


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
