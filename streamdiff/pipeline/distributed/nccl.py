"""The NCCL link: tensors stay on the device, records go over TCP.

Each edge of the ring has a communicator of two ranks. The record of a message goes ahead over a TCP link, before this
rank's host has even handed the message to its device; it orders and ends the traffic, and announces one transfer of the
edge's full size, whatever the message is, so that both ends always start the same transfers in the same order. Nothing
waits for the device and nothing is read from it; who may touch a slot when is said by events (`cuda_streams.py`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from streamdiff import clock
from streamdiff.pipeline.distributed.cuda_streams import CudaStreams, ReceiveLane, SendLane, Streams, Transfer
from streamdiff.pipeline.distributed.link import SLOTS, LinkClosed, Sender, ring_edges
from streamdiff.pipeline.distributed.message import MessageLayout, StageMessage
from streamdiff.pipeline.distributed.tcp import TcpReceiver, TcpSender

# A receive waits as long as no picture is wanted; the records say which rank is gone.
FOREVER = timedelta(days=3650)
MAX_CTAS = 4
"""Bounds the multiprocessors that a transfer holds while it waits for its match: NCCL gives one to point-to-point for
every two. `NCCL_MAX_CTAS` in the environment wins. Reason: docs/decisions/0010."""
GONE_S = 10.0
"""What an end has sent is there so long after it has closed, or never will be."""
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""torch's watchdog aborts transfers, whose readers then see garbage, or ends the process without a word. Here records
and heartbeats find who fails, and say it; so the watchdog only watches."""


def edge_groups(
    stages: int,
    device: torch.device,
    backend: str = "nccl",
    on_edge: Callable[[int], None] = lambda edge: None,
    shares: int = 1,
) -> list[dist.ProcessGroup | None]:
    """The process group of every edge of `ring_edges` by its number, None for edges of other ranks.

    All ranks of the default group call this, together and as often. Communicators are made here and not at the first
    message, when the other rank may be busy. Two stages have two edges between the same ranks, and a group for each.
    `on_edge` gets the next edge. Mutates: this process's environment, see `group_options`."""
    bound = bound_device(device)
    groups: list[dist.ProcessGroup | None] = []
    for edge, ends in enumerate(ring_edges(stages, shares)):
        ranks = list(ends)
        if dist.get_rank() in ranks:
            on_edge(edge)
        options = group_options() if backend == "nccl" else None
        if options is not None:
            options.config.max_ctas = MAX_CTAS
        group = dist.new_group(
            ranks, timeout=FOREVER, backend=backend, pg_options=options, device_id=bound, group_desc=f"edge {edge}"
        )
        groups.append(group if dist.get_rank() in ranks else None)
    return groups


def bound_device(device: torch.device) -> torch.device | None:
    """The device that a communicator is made for at once, None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def group_options() -> dist.ProcessGroupNCCL.Options:
    """Of one group: torch writes the group's name and ranks into them, and reads `ENVIRONMENT` as it makes the group.
    Mutates: this process's environment, by that."""
    os.environ.update(ENVIRONMENT)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # of a pool that nothing else takes from
    options._timeout = FOREVER
    options.config.blocking = 1  # otherwise torch polls, and the caller waits all the same
    return options


@contextmanager
def _ending_link() -> Iterator[None]:
    """What ends a transfer early ends the link."""
    try:
        yield
    except RuntimeError as error:
        raise LinkClosed(f"the link is closed: {error}") from error


def _transfer(operation: dist.P2POp) -> Transfer:
    """Start one transfer of a slot.

    A batch of one: it uses the group's own communicator, where a plain send or receive may make another one.
    """
    with _ending_link():
        (work,) = dist.batch_isend_irecv([operation])
    return _ending_link()(work.wait)


@dataclass(frozen=True)
class NcclEnd:
    """One end of an edge, with rank `peer` at the other: tensors go over the edge's `group`, records over TCP,
    with `tag`. `streams` are those of `device`."""

    layout: MessageLayout
    peer: int
    tag: int
    device: torch.device
    group: dist.ProcessGroup
    streams: Streams | None = None

    def slots(self, operation: Callable[..., dist.Work | None]) -> tuple[list[torch.Tensor], Callable[[int], Transfer]]:
        """The buffers of the slots `[nbytes]`, and what starts the transfer of one by `dist.isend` or `dist.irecv`."""
        buffers = [torch.empty(self.layout.nbytes, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        operations = [dist.P2POp(operation, buffer, self.peer, self.group) for buffer in buffers]
        return buffers, lambda slot: _transfer(operations[slot])


class NcclSender(Sender):
    """The sending end of an edge.

    `ready` and the waiting of `announce` are those of the records. How far a rank is ahead of its neighbour and of its
    own device is bounded by the ring, not here.
    """

    def __init__(self, end: NcclEnd) -> None:
        self._layout = end.layout
        self._buffers, start = end.slots(dist.isend)
        self._lane = SendLane(end.streams or CudaStreams(end.device), start)
        self._records = TcpSender(end.layout.bare, end.peer, end.tag)
        self._announced = False

    @property
    def ready(self) -> bool:
        return self._records.ready

    def announce(self, message: StageMessage) -> None:
        self._records.send(message)
        self._announced = True

    def send(self, message: StageMessage) -> None:
        if not self._announced:
            self._records.send(message)
        self._announced = False
        self._lane.send(lambda slot: self._layout.write(message, self._buffers[slot]))

    def warm_up(self) -> None:
        """Send one slot of no meaning to the other end's `warm_up`, and wait on the host until it has been sent."""
        self._lane.send(lambda slot: None)
        self._lane.drain()

    def close(self, limit_s: float = 0.0) -> None:
        self._records.close()

    def flush(self, limit_s: float) -> None:
        """Wait until what was sent has arrived. The group stays; its owner ends it.

        Raises:
            LinkClosed: the other end went away in the midst of a message.
        """
        self._records.flush(limit_s)
        if not self._records.broken:
            self._lane.drain()


class NcclReceiver:
    """The receiving end of an edge.

    What was received is read on the stream that is current when it is received, and again at the next `receive`.

    A follower is handed a message as soon as its record is there, and so is ahead of its device. The head's end is
    `paced`: there a message comes back when the device has it (docs/decisions/0010).
    """

    def __init__(self, end: NcclEnd, paced: bool = False) -> None:
        self._layout = end.layout
        self._buffers, start = end.slots(dist.irecv)
        self._streams = end.streams or CudaStreams(end.device)
        self._lane = ReceiveLane(self._streams, start)
        self._records = TcpReceiver(end.layout.bare, end.peer, end.tag, torch.device("cpu"))
        self._paced = paced
        self._next: StageMessage | None = None  # whose tensors are awaited
        self._peer, self._here = end.peer, threading.Event()
        self._ended_s: float | None = None  # since when the other end is known to have closed, or to be gone
        self._on_arrival: Callable[[], None] = lambda: None

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        self._lane.release()
        end_s = None if wait_s is None else clock.monotonic_s() + wait_s
        # One record at a time: a receive that stands on the device is of the message that this host carries out next.
        if self._next is None:
            if (message := self._records.receive(wait_s)) is None:
                return None
            self._lane.announce()
            self._next = message
            if self._paced:
                self._here.clear()
                self._streams.when(self._lane.arrival(), self._arrived)
        if self._paced and not self._is_here(end_s):
            return None
        message, self._next = self._next, None
        return self._layout.attach(message, self._buffers[self._lane.take()])

    def _is_here(self, end_s: float | None) -> bool:
        """Whether the tensors of the next message come until `end_s`; None: wait for ever. Raises LinkClosed when they
        never will."""
        while not self._here.wait(GONE_S if end_s is None else max(0.0, end_s - clock.monotonic_s())):
            if self._records.ended:
                now_s = clock.monotonic_s()
                self._ended_s = now_s if self._ended_s is None else self._ended_s
                if now_s - self._ended_s > GONE_S:
                    raise LinkClosed(f"the link with rank {self._peer} is closed: a message broke off", self._peer)
            if end_s is not None:
                return False
        return True

    def _arrived(self) -> None:
        self._here.set()
        self._on_arrival()

    def warm_up(self) -> None:
        """Take what the other end's `warm_up` sends, and wait on the host until it is there."""
        self._lane.announce()
        self._lane.take()
        self._lane.release()
        self._lane.drain()

    def notify(self, call: Callable[[], None]) -> None:
        self._on_arrival = call
        self._records.notify(call)

    def close(self, limit_s: float = 0.0) -> None:
        self._records.close(limit_s)


def warm_up(ends: Mapping[int, NcclSender | NcclReceiver], on_edge: Callable[[int], None] = lambda edge: None) -> None:
    """Have every edge of a ring carry one message, edge by edge in ascending order; all its ranks call this, with their
    `ends` by the number of the edge in `ring_edges`.

    A communicator connects its ranks at their first transfer, where the host of each waits for the other's: both ends
    of an edge come to it together, and never all ranks with a send, which would each wait for the next
    (docs/decisions/0010). Afterwards nothing is under way on the device. `on_edge` gets the next edge.
    """
    for edge in sorted(ends):
        on_edge(edge)
        ends[edge].warm_up()
