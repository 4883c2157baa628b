"""What both ends of a link do in a scenario of the contract; played by two threads or by two processes.

As a program (`python -m tests.pipeline.links.scenarios RANK 2 PORT KIND`) it plays one end of links between two
processes, one per scenario. KIND is `gloo`; or `lanes`, the NCCL link with gloo in NCCL's place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from streamdiff.pipeline.distributed.gloo import GlooReceiver, GlooSender
from streamdiff.pipeline.distributed.link import LinkClosed, Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, MessageLayout, SessionUpdate, StageMessage
from streamdiff.pipeline.distributed.nccl import NcclReceiver, NcclSender, edge_groups, warm_up
from streamdiff.pipeline.scheduler.step import MicroStep
from tests.small import CPU

ROWS = 3
LEAVE_S = 60.0
SMALL = MessageLayout(ROWS, (((4, 6), torch.float32), ((2, 6), torch.float32)), ((5, 3), torch.float32))
LARGE = MessageLayout(ROWS, (((2_000_000,), torch.float32),), None)


def work(number: int, wire: MessageLayout = SMALL) -> StageMessage:
    """The work number `number`: every fifth a text, otherwise one to three rows; all values follow from the number."""
    generator = torch.Generator().manual_seed(number)
    if number % 5 == 4 and wire.text is not None:
        return StageMessage(
            MessageKind.TEXT,
            (),
            SessionUpdate(number, 1, 2, 3, "matched"),
            (torch.randn(wire.text[0], generator=generator),),
        )
    count = number % ROWS + 1
    rows = tuple(MicroStep(row, number, 1, 4, 2**40 + number) for row in range(count))
    return StageMessage(
        MessageKind.ROWS, rows, None, tuple(torch.randn(count, *shape, generator=generator) for shape, _ in wire.rows)
    )


def check(got: StageMessage | None, number: int, wire: MessageLayout = SMALL) -> None:
    expected = work(number, wire)
    assert got is not None
    assert (got.kind, got.rows, got.control) == (expected.kind, expected.rows, expected.control), number
    assert len(got.tensors) == len(expected.tensors)
    for one, other in zip(got.tensors, expected.tensors, strict=True):
        assert torch.equal(one.cpu(), other), f"tensors of work {number}"


def send_in_order(sender: Sender, count: int = 60, wire: MessageLayout = SMALL) -> None:
    """Send works and write over their tensors at once: they were copied."""
    for number in range(count):
        sent = work(number, wire)
        sender.send(sent)
        for tensor in sent.tensors:
            tensor.fill_(float("nan"))


def receive_in_order(receiver: Receiver) -> None:
    for number in range(60):
        check(receiver.receive(60.0), number)


def receive_and_hold(receiver: Receiver) -> None:
    """What was received stays as it is while the sender goes on, until the next receive."""
    for number in range(60):
        got = receiver.receive(60.0)
        for _ in range(20):  # the sender fills whatever slots it may meanwhile
            torch.randn(64, 64) @ torch.randn(64, 64)
        check(got, number)


def send_large(sender: Sender) -> None:
    send_in_order(sender, 5, LARGE)


def receive_large(receiver: Receiver) -> None:
    for number in range(5):
        check(receiver.receive(60.0), number, LARGE)


def send_three_and_close(sender: Sender) -> None:
    """Large ones, and then the sender may be gone at once: what was sent still arrives."""
    send_in_order(sender, 3, LARGE)
    sender.close()


def receive_three_and_the_end(receiver: Receiver) -> None:
    for number in range(3):
        check(receiver.receive(60.0), number, LARGE)
    try:
        receiver.receive(60.0)
    except LinkClosed:
        return
    raise AssertionError("nothing said that the link is closed")


def receive_none_then_some(receiver: Receiver) -> None:
    """Without waiting nothing is there or the first is; waiting brings it."""
    got = receiver.receive(0.0)
    check(got if got is not None else receiver.receive(60.0), 0)
    for number in range(1, 60):
        check(receiver.receive(None), number)


SCENARIOS: dict[str, tuple[MessageLayout, Callable[[Sender], None], Callable[[Receiver], None]]] = {
    "order": (SMALL, send_in_order, receive_in_order),
    "held": (SMALL, send_in_order, receive_and_hold),
    "large": (LARGE, send_large, receive_large),
    "wait": (SMALL, send_in_order, receive_none_then_some),
    "close": (LARGE, send_three_and_close, receive_three_and_the_end),
}


class HostStreams:
    """Of a device that has done everything when a call returns: who waits for a transfer waits on the host."""

    def current(self) -> None:
        pass

    def new(self) -> None:
        pass

    def event(self) -> Done:
        return Done()

    def use(self, stream: None) -> AbstractContextManager[None]:
        return nullcontext()


class Done:
    """An event of such a device."""

    def record(self, stream: None) -> None:
        pass

    def wait(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def ends(kind: str, rank: int, tag: int, wire: MessageLayout) -> tuple[Sender, Receiver]:
    """The sending end to the other of two ranks and the receiving end from it. Called by both together."""
    if kind == "gloo":
        return GlooSender(wire, 1 - rank, 2 * tag + rank), GlooReceiver(wire, 1 - rank, 2 * tag + 1 - rank, CPU)
    groups, streams = edge_groups(2, CPU, backend="gloo"), HostStreams()
    out, into = groups[rank], groups[1 - rank]
    assert out is not None and into is not None and out is not into
    sender = NcclSender(wire, 1 - rank, 2 * tag + rank, CPU, out, streams=streams)
    receiver = NcclReceiver(wire, 1 - rank, 2 * tag + 1 - rank, CPU, into, streams=streams)
    warm_up(sender, receiver)
    return sender, receiver


def main(rank: int, port: int, kind: str) -> None:
    """Play all scenarios; rank 0 receives. Each link is closed in order after its scenario."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(days=3650))
    for tag, (name, (wire, send, receive)) in enumerate(SCENARIOS.items()):
        sender, receiver = ends(kind, rank, tag, wire)
        if rank == 0:
            receive(receiver)
            print(f"{name} passed", flush=True)
        else:
            send(sender)
        sender.close()
        receiver.close(LEAVE_S)
        sender.flush(LEAVE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[3]), sys.argv[4])
