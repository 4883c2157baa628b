"""The NCCL link where no GPU is needed: how the two ends of a link end.

Its contract and whole rings over it, with `rendezvous_backend` in the place of NCCL, are in `test_link.py`,
`test_rendezvous_ring.py` and `test_ring_processes.py`; the order on the device in `test_cuda_streams.py`; real GPUs in
`tests/gpu/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from streamdiff.pipeline import topology
from streamdiff.pipeline.distributed import nccl as links_nccl
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.distributed.message import StageMessage
from tests.pipeline.distributed.rendezvous_backend import Event, Streams
from tests.pipeline.distributed.scenarios import SMALL, work
from tests.small import CPU, small_model

END = links_nccl.NcclEnd(SMALL, 0, 0, CPU, None, streams=Streams())  # type: ignore[arg-type]


class Records:
    """Both ends of a TCP link in one: brings these works, then says that the link is closed; takes everything."""

    ready = True

    def __init__(self, works: list[StageMessage], broken: bool = False) -> None:
        self.works, self.broken, self.ended = works, broken, False

    def receive(self, wait_s: float | None) -> StageMessage | None:
        if not self.works:
            raise LinkClosed("the link is closed")
        return self.works.pop(0)

    def send(self, work: StageMessage) -> None:
        pass

    def notify(self, call: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass

    def flush(self, limit_s: float) -> None:
        pass


class Transfers:
    """Slots whose transfer was started, and those that were waited for."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waited: list[int] = []

    def start(self, slot: int) -> Callable[[], None]:
        self.started.append(slot)
        return self.wait

    def wait(self) -> None:
        self.waited.append(self.started[len(self.waited)])


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    monkeypatch.setattr(dist, "P2POp", lambda operation, buffer, peer, group: None)
    return Transfers()


def test_what_was_announced_before_the_end_is_handed_out(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records([work(number).bare for number in range(3)])
    monkeypatch.setattr(links_nccl, "TcpReceiver", lambda *arguments: records)
    receiver = links_nccl.NcclReceiver(END)
    monkeypatch.setattr(receiver._lane, "_start", transfers.start)
    for number in range(3):
        got, expected = receiver.receive(), work(number)
        assert got is not None and (got.kind, got.rows, got.update) == (expected.kind, expected.rows, expected.update)
        assert [tensor.shape for tensor in got.tensors] == [tensor.shape for tensor in expected.tensors]
    with pytest.raises(LinkClosed):
        receiver.receive()
    assert transfers.started == [0, 1, 0], "one transfer for every message, and none that nobody announced"


class Late(Streams):
    """Those of a device that is behind: what waits for its events is called by the test."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def when(self, event: Event, call: Callable[[], None]) -> None:
        self.calls.append(call)


def test_the_head_is_handed_a_work_when_its_device_has_it(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records([work(0).bare])
    monkeypatch.setattr(links_nccl, "TcpReceiver", lambda *arguments: records)
    late, heard = Late(), list[int]()
    receiver = links_nccl.NcclReceiver(replace(END, streams=late), paced=True)  # type: ignore[arg-type]
    receiver.notify(lambda: heard.append(1))
    monkeypatch.setattr(receiver._lane, "_start", transfers.start)
    assert receiver.receive() is None and receiver.receive(0.01) is None
    assert transfers.started == [0] and len(late.calls) == 1, "it is on its way, once"
    [arrived] = late.calls
    arrived()
    assert heard == [1]
    got = receiver.receive(None)
    assert got is not None and got.rows == work(0).rows


def test_a_message_that_broke_off_ends_the_link(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records([work(0).bare])
    monkeypatch.setattr(links_nccl, "TcpReceiver", lambda *arguments: records)
    receiver = links_nccl.NcclReceiver(replace(END, streams=Late()), paced=True)  # type: ignore[arg-type]
    monkeypatch.setattr(receiver._lane, "_start", transfers.start)
    assert receiver.receive() is None
    records.ended = True
    assert receiver.receive() is None, "what was sent may still come"
    monkeypatch.setattr(links_nccl, "GONE_S", -1.0)
    with pytest.raises(LinkClosed, match="a message broke off"):
        receiver.receive()


@pytest.mark.parametrize("broken", [False, True])
def test_close_waits_for_the_last_transfers_unless_nobody_takes_them(
    broken: bool, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_nccl, "TcpSender", lambda *arguments: Records([], broken))
    sender = links_nccl.NcclSender(END)
    monkeypatch.setattr(sender._lane, "_start", transfers.start)
    for number in range(3):
        sender.send(work(number))
    assert (transfers.started, transfers.waited) == ([0, 1, 0], [0]), "a slot is written when it has been sent"
    sender.close()
    sender.flush(0.0)
    assert sorted(transfers.waited) == ([0] if broken else [0, 0, 1])


def test_a_rank_that_only_decodes_meets_nobody_where_the_head_has_no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage connects nothing; it hung on CUDA, where the other rank waited for it."""
    met: list[str] = []
    monkeypatch.setattr(topology, "edge_groups", lambda *given, **named: met.append("groups"))
    monkeypatch.setattr(dist, "barrier", lambda *given: met.append("barrier"))
    topology.join_edges(topology.StageTopology(1, 1, link="nccl"), small_model(1).spec, CPU)
    assert not met
    topology.join_edges(topology.StageTopology(2, 2, link="nccl"), small_model(1).spec, CPU)
    assert met == ["groups", "barrier"]
