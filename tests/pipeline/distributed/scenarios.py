"""What both ends of a link do in a scenario of the contract; played by two threads or by two processes.

As a program (`python -m tests.pipeline.distributed.scenarios RANK 2 PORT KIND`) it plays one end of links between two
processes, one per scenario. KIND is `tcp`; or `lanes`, the NCCL link over `rendezvous_backend`.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from streamdiff.core import MicroStep
from streamdiff.pipeline import topology
from streamdiff.pipeline.distributed.link import LinkClosed, Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, MessageLayout, SessionUpdate, StageMessage
from streamdiff.pipeline.distributed.nccl import NcclEnd, NcclReceiver, NcclSender, warm_up
from streamdiff.pipeline.distributed.tcp import TcpReceiver, TcpSender
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
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
            SessionUpdate(number, 1, 2, 3, "same_step"),
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
    assert (got.kind, got.rows, got.update) == (expected.kind, expected.rows, expected.update), number
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


def ends(kind: str, rank: int, tag: int, wire: MessageLayout) -> tuple[Sender, Receiver]:
    """The sending end to the other of two ranks and the receiving end from it. Called by both together."""
    if kind == "tcp":
        receiver = TcpReceiver(wire, 1 - rank, 2 * tag + 1 - rank, CPU)
        return TcpSender(wire, 1 - rank, 2 * tag + rank), receiver
    use_rendezvous()
    return nccl_ends(rank, tag, wire, CPU)


def nccl_ends(
    rank: int, tag: int, wire: MessageLayout, device: torch.device, ranks: int = 2, order: Callable[..., None] = warm_up
) -> tuple[NcclSender, NcclReceiver]:
    """As `ends`, of the NCCL link, to the rank after this one and from the one before it; warmed in this order."""
    groups = topology.edge_groups(ranks, device)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    out, into = groups[rank], groups[before]
    assert out is not None and into is not None and out is not into
    receiver = NcclReceiver(NcclEnd(wire, before, ranks * tag + before, device, into))
    sender = NcclSender(NcclEnd(wire, after, ranks * tag + rank, device, out))
    order({rank: sender, before: receiver})
    return sender, receiver


def all_send_first(ends: Mapping[int, NcclSender | NcclReceiver], *rest: object) -> None:
    """What the product did once: each rank waits for the next, all around."""
    [sender] = (end for end in ends.values() if isinstance(end, NcclSender))
    [receiver] = (end for end in ends.values() if isinstance(end, NcclReceiver))
    sender._lane.send(lambda slot: None)
    receiver.warm_up()
    sender._lane.drain()


def all_receive_first(ends: Mapping[int, NcclSender | NcclReceiver], *rest: object) -> None:
    """As wrong, the other way round."""
    for end in sorted(ends.values(), key=lambda end: isinstance(end, NcclSender)):
        end.warm_up()


def connect_often(rank: int, ranks: int, device: torch.device, times: int = 20) -> None:
    """Make rings and warm them, each rank late by chance."""
    chance = random.Random(rank)
    for number in range(times):

        def late(*given: Any) -> None:
            threading.Event().wait(chance.choice((0.0, 0.0, 0.002, 0.05)))
            warm_up(*given)

        sender, receiver = nccl_ends(rank, number, SMALL, device, ranks, late)
        sender.close()
        receiver.close(LEAVE_S)
        sender.flush(LEAVE_S)
    print(f"connected {times} times", flush=True)


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
