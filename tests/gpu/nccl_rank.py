"""One rank of `nccl_ring.py`: `python -m tests.gpu.nccl_rank RANK PART RANKS PORT`."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from streamdiff import clock
from streamdiff.core import MicroStep
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, MessageLayout, StageMessage
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.topology import StageTopology, connect_stage
from tests.gpu.nccl_ring import finding
from tests.pipeline.distributed.scenarios import SCENARIOS, all_send_first, connect_often, nccl_ends
from tests.pipeline.playing import CHUNKS_LONG, THREE, play, same
from tests.small import small_model

MIB = 2**20
STEADY = MessageLayout(1, (((16 * MIB,), torch.uint8),), None)
MESSAGES = 100
LOCK_S = 30.0
"""How long ranks may take to connect before that counts as a lock."""


class OnDevice:
    """An outbox that is given tensors of the device, which are written over as soon as they were handed in."""

    def __init__(self, sender: Sender, device: torch.device) -> None:
        self.sender, self.device = sender, device

    def send(self, work: StageMessage) -> None:
        tensors = tuple(tensor.to(self.device) for tensor in work.tensors)
        self.sender.send(replace(work, tensors=tensors))
        for tensor in tensors:
            tensor.fill_(float("nan"))

    def close(self) -> None:
        self.sender.close()

    def flush(self, limit_s: float) -> None:
        self.sender.flush(limit_s)


def order(rank: int, ranks: int, device: torch.device) -> None:
    """What every rank of a ring must not do; ends this process, since a thread in NCCL cannot be called back."""

    def end() -> None:
        print("all sending first locks", flush=True)
        os._exit(0)

    timer = threading.Timer(LOCK_S, end)
    timer.daemon = True
    timer.start()
    nccl_ends(rank, 0, STEADY, device, ranks, all_send_first)
    print("all sending first does not lock here", flush=True)
    os._exit(0)


def links(rank: int, ranks: int, device: torch.device) -> None:
    """The contract of links, from rank 1 to rank 0; the last scenario ends with the sender's process."""
    for tag, (name, (wire, send, receive)) in enumerate(SCENARIOS.items()):
        sender, receiver = nccl_ends(rank, tag, wire, device)
        if rank == 0:
            receive(receiver)
            print(f"{name} passed", flush=True)
        else:
            send(OnDevice(sender, device))
    os._exit(0)


@contextmanager
def no_host_sync() -> Iterator[None]:
    """torch raises an error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def numbered(number: int, device: torch.device) -> StageMessage:
    filled = torch.full((1, 16 * MIB), number % 251, dtype=torch.uint8, device=device)
    return StageMessage(MessageKind.ROWS, (MicroStep(0, number, 0, 4, 0),), None, (filled,))


def steady(rank: int, ranks: int, device: torch.device) -> None:
    """Messages of 16 MiB from rank 1 to rank 0 without a host that waits for its device, and how long one takes."""
    works = [numbered(number, device) for number in range(MESSAGES)]
    seen = torch.empty(MESSAGES, 2, dtype=torch.uint8, device=device)
    sender, receiver = nccl_ends(rank, 0, STEADY, device)
    torch.cuda.current_stream(device).synchronize()
    dist.barrier()
    started_s = clock.monotonic_s()
    with no_host_sync():
        if rank == 1:
            for work in works:
                sender.send(work)
        else:
            receive_all(receiver, seen)
    torch.cuda.current_stream(device).synchronize()
    took_s = clock.monotonic_s() - started_s
    if rank == 0:
        expected = torch.tensor([[number % 251] * 2 for number in range(MESSAGES)], dtype=torch.uint8)
        assert torch.equal(seen.cpu(), expected)
        print(f"{MESSAGES} messages of 16 MiB: {took_s / MESSAGES * 1e6:.0f} us each {label(ranks)}", flush=True)
    else:
        sender.close()


def receive_all(receiver: Receiver, seen: torch.Tensor) -> None:
    """Note the least and the most of every message. Mutates: seen."""
    for number in range(MESSAGES):
        got = receiver.receive(60.0)
        assert got is not None
        seen[number, 0].copy_(got.tensors[0].amin())
        seen[number, 1].copy_(got.tensors[0].amax())


def label(ranks: int) -> str:
    if torch.cuda.device_count() < ranks:
        return "(ranks share a GPU: shows that it is right, not how fast it is)"
    return "(one GPU per rank)"


@contextmanager
def told_syncs(rank: int) -> Iterator[None]:
    """Print where the host waits for the device: outside the links, which `steady` holds to none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)]
    for place in sorted(set(places)):
        print(f"rank {rank} waits for its device {places.count(place)} times in {place}", flush=True)


def on(device: torch.device) -> Model:
    """A small random model there."""
    model = small_model(1, layers=4, sink=2)
    model.denoiser.model.to(device)
    return model


def ring(rank: int, ranks: int, device: torch.device) -> None:
    """Three sessions, one of each KV context, around the ring; each compared to itself on one stage on the same GPU."""
    model = on(device)
    topology, part = StageTopology(rank, ranks, link="nccl"), model.part(*split_evenly(model.blocks, ranks)[rank])
    if rank:
        worker = connect_stage(part, topology, device).worker()
        for _ in range(100):  # first calls
            worker.step(None)
        with told_syncs(rank):
            worker.run()
        return
    head = Ring(part, device, topology.rows, connect_stage(part, topology, device))
    with told_syncs(rank):
        made = play(head, model, THREE, CHUNKS_LONG)
    head.stop()
    for name, order in THREE.items():
        alone = play(Ring(model, device), model, {name: order}, CHUNKS_LONG)[name]
        worst = max(float((one - other).abs().max()) for one, other in zip(made[name], alone, strict=True))
        print(finding(order.kv_context, same(made[name], alone), worst), flush=True)


def main(rank: int, part: str, ranks: int, port: int) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=300))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(days=3650))
    {"order": order, "connect": connect_often, "links": links, "steady": steady, "ring": ring}[part](
        rank, ranks, device
    )
    dist.barrier()
    os._exit(0)  # links have receives posted that will never be answered


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
