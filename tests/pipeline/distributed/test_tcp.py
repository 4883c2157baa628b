"""Both ends of a TCP edge in one process: who is let in, what waits for whom, and what is said when an end is gone.

The contract of links, over processes, is in `test_link.py`.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.distributed.tcp import TcpReceiver, TcpSender
from tests.pipeline.distributed.scenarios import LARGE, SMALL, check, work
from tests.small import CPU

WAIT_S = 60.0
PEER = 3


@pytest.fixture(autouse=True)
def invitations(monkeypatch: pytest.MonkeyPatch) -> deque[torch.Tensor]:
    """What the receiving ends have sent by gloo."""
    posted = deque[torch.Tensor]()

    def isend(text: torch.Tensor, *rest: object, **more: object) -> SimpleNamespace:
        posted.append(text)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "recv", lambda text, *rest, **more: text.copy_(posted[-1]))
    return posted


@pytest.fixture
def edge() -> Iterator[tuple[TcpSender, TcpReceiver]]:
    receiver = TcpReceiver(SMALL, PEER, 0, CPU)
    sender = TcpSender(SMALL, PEER, 0)
    yield sender, receiver
    sender.close()
    receiver.close(WAIT_S)
    sender.flush(WAIT_S)


def test_who_does_not_say_the_token_is_turned_away(invitations: deque[torch.Tensor]) -> None:
    receiver = TcpReceiver(SMALL, PEER, 0, CPU)
    host, port, token = json.loads(invitations[-1].numpy().tobytes())
    assert host == "127.0.0.1", "ranks of one machine are not to be reached from another"
    for said in (b"", bytes(len(token) // 2), bytes.fromhex(token)[:-1]):
        with socket.create_connection((host, port), timeout=WAIT_S) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    sender = TcpSender(SMALL, PEER, 0)
    sender.send(work(0))
    check(receiver.receive(WAIT_S), 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=WAIT_S)
    sender.close()
    receiver.close(WAIT_S)
    sender.flush(WAIT_S)
    assert not sender.broken


def test_no_thread_stands_between_send_and_the_kernel(edge: tuple[TcpSender, TcpReceiver]) -> None:
    sender, receiver = edge
    for number in range(20):
        sender.send(work(number))
        assert sender._left_over == 0 and sender.ready, "it left at once, and its slot is free"
        check(receiver.receive(WAIT_S), number)


@pytest.mark.slow
def test_what_the_kernel_does_not_take_leaves_while_send_has_returned() -> None:
    """Nobody receives, and the messages are larger than what a socket holds."""
    receiver = TcpReceiver(LARGE, PEER, 0, CPU)
    sender = TcpSender(LARGE, PEER, 0)
    for number in range(4):
        sender.send(work(number, LARGE))
    assert sender._left_over > sender._made_up and not sender.ready
    for number in range(4):
        check(receiver.receive(WAIT_S), number, LARGE)
    sender.close()
    receiver.close(WAIT_S)
    sender.flush(WAIT_S)
    assert not sender.broken and sender._left_over == sender._made_up


def test_a_receiving_end_that_goes_is_noticed_by_who_sends(edge: tuple[TcpSender, TcpReceiver]) -> None:
    sender, receiver = edge
    sender.send(work(0))
    check(receiver.receive(WAIT_S), 0)
    sender._connection.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that died
    with pytest.raises(LinkClosed, match=f"rank {PEER} is closed") as closed:
        sender.send(work(1))
    assert closed.value.peer == PEER and sender.broken
    with pytest.raises(LinkClosed, match=f"rank {PEER} is closed"):
        receiver.receive(WAIT_S)


def test_a_message_that_ends_in_its_midst_is_no_end_in_order(edge: tuple[TcpSender, TcpReceiver]) -> None:
    sender, receiver = edge
    sender._connection.sendall(bytes(7))
    sender._connection.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed, match="in the midst of a message"):
        receiver.receive(WAIT_S)
