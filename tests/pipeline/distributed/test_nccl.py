"""The NCCL link where no GPU is needed: which link is picked, and how the two ends of a link end.

Its contract and whole rings over it, with gloo in the place of NCCL, are in `test_links.py` and
`test_ring_processes.py`; the order on the device in `test_lanes.py`; real GPUs in `tests/gpu/`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from streamdiff.errors import ConfigError
from streamdiff.pipeline.distributed import nccl as links_nccl
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.topology import pick_link
from tests.pipeline.distributed.scenarios import SMALL, HostStreams, work
from tests.small import CPU

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "device", "shared", "nccl", "picked"),
    [
        ("auto", CUDA, False, True, "nccl"),
        ("auto", CUDA, True, True, "gloo"),
        ("auto", CUDA, False, False, "gloo"),
        ("auto", CPU, False, True, "gloo"),
        ("gloo", CUDA, False, True, "gloo"),
        ("gloo", CPU, False, False, "gloo"),
        ("nccl", CUDA, False, True, "nccl"),
        ("nccl", CUDA, True, True, "nccl"),
    ],
)
def test_which_link(
    wanted: str, device: torch.device, shared: bool, nccl: bool, picked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    assert pick_link(wanted, device, shared) == picked


@pytest.mark.parametrize(
    ("wanted", "device", "nccl", "message"),
    [
        ("nccl", CPU, True, "the device is cpu.*use `auto` or `gloo`, or a CUDA device"),
        ("nccl", CUDA, False, "no NCCL; use `auto` or `gloo`, or install"),
        ("mpi", CUDA, True, "'mpi'; it can be `auto`, `gloo` or `nccl`"),
    ],
)
def test_a_link_that_cannot_be_says_the_way_out(
    wanted: str, device: torch.device, nccl: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(ConfigError, match=message):
        pick_link(wanted, device)


class Records:
    """Both ends of a gloo link in one: brings these works, then says that the link is closed; takes everything."""

    ready = True

    def __init__(self, works: list[StageMessage], broken: bool = False) -> None:
        self.works, self.broken = works, broken

    def receive(self, wait_s: float | None) -> StageMessage | None:
        if not self.works:
            raise LinkClosed("the link is closed")
        return self.works.pop(0)

    def send(self, work: StageMessage) -> None:
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

    def start(self, slot: int) -> Transfers:
        self.started.append(slot)
        return self

    def wait(self) -> None:
        self.waited.append(self.started[len(self.waited)])


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    monkeypatch.setattr(dist, "P2POp", lambda operation, buffer, peer, group: None)
    return Transfers()


def test_what_was_announced_before_the_end_is_handed_out(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records([SMALL.bare.read(SMALL.record(work(number), number), torch.empty(0))[1] for number in range(3)])
    monkeypatch.setattr(links_nccl, "GlooReceiver", lambda *arguments: records)
    receiver = links_nccl.NcclReceiver(SMALL, 0, 0, CPU, None, streams=HostStreams())
    monkeypatch.setattr(receiver._lane, "_start", transfers.start)
    for number in range(3):
        got, expected = receiver.receive(), work(number)
        assert got is not None and (got.kind, got.rows, got.control) == (expected.kind, expected.rows, expected.control)
        assert [tensor.shape for tensor in got.tensors] == [tensor.shape for tensor in expected.tensors]
    with pytest.raises(LinkClosed):
        receiver.receive()
    assert transfers.started == [0, 1, 0], "one transfer for every message, and none that nobody announced"


@pytest.mark.parametrize("broken", [False, True])
def test_close_waits_for_the_last_transfers_unless_nobody_takes_them(
    broken: bool, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_nccl, "GlooSender", lambda *arguments: Records([], broken))
    sender = links_nccl.NcclSender(SMALL, 0, 0, CPU, None, streams=HostStreams())
    monkeypatch.setattr(sender._lane, "_start", transfers.start)
    for number in range(3):
        sender.send(work(number))
    assert (transfers.started, transfers.waited) == ([0, 1, 0], [0]), "a slot is written when it has been sent"
    sender.close()
    sender.flush(0.0)
    assert sorted(transfers.waited) == ([0] if broken else [0, 0, 1])
