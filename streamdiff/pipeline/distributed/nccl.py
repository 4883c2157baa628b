"""The NCCL link: tensors stay on the device, records go over gloo.

Each edge of the ring has a communicator of two ranks. The record of a message goes ahead over a gloo link; it orders,
bounds and ends the traffic, and announces one transfer of the edge's full size, whatever the work is, so that both ends
always start the same transfers in the same order. Nothing waits for the device and nothing is read from it; who may
touch a slot when is said by events (`cuda_streams.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from streamdiff.pipeline.distributed.cuda_streams import CudaStreams, ReceiveLane, SendLane, Streams, Transfer
from streamdiff.pipeline.distributed.gloo import GlooReceiver, GlooSender
from streamdiff.pipeline.distributed.link import SLOTS, LinkClosed
from streamdiff.pipeline.distributed.message import MessageLayout, StageMessage

# A receive waits for as long as nobody wants a picture; who is gone is told by the records.
FOREVER = timedelta(days=3650)


def edge_groups(stages: int, device: torch.device, backend: str = "nccl") -> list[dist.ProcessGroup | None]:
    """The process group of every edge by its number, None for edges of other ranks.

    All ranks of the default group call this, together and as often. Communicators are made here and not at the first
    message, when the other rank may be busy. Two stages have two edges between the same ranks, and a group for each.

    Raises:
        ValueError: the default group has fewer ranks than `stages`.
    """
    if dist.get_world_size() < stages:
        raise ValueError(f"there are {dist.get_world_size()} ranks; a ring of {stages} stages needs {stages}")
    bound = None
    if device.type == "cuda":
        bound = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    groups: list[dist.ProcessGroup | None] = []
    for edge in range(stages if stages > 1 else 0):
        ranks = [edge, (edge + 1) % stages]
        group = dist.new_group(ranks, timeout=FOREVER, backend=backend, device_id=bound, group_desc=f"edge {edge}")
        groups.append(group if dist.get_rank() in ranks else None)
    return groups


class _Transfer:
    """One transfer of a slot; what ends it early ends the link.

    A batch of one: it uses the group's own communicator, where a plain send or receive may make another one.
    """

    def __init__(self, operation: dist.P2POp) -> None:
        try:
            (self._work,) = dist.batch_isend_irecv([operation])
        except RuntimeError as error:
            raise LinkClosed(f"the link is closed: {error}") from error

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkClosed(f"the link is closed: {error}") from error


def _slots(layout: MessageLayout, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]


class NcclSender:
    """The sending end of an edge to rank `peer`, over the edge's `group`; records go over `records`.

    `ready` and the waiting of `send` are those of the records: a rank is never more than a few messages ahead of what
    its neighbour has taken in. How far it is ahead of its own device is bounded by the ring, not here.
    """

    def __init__(
        self,
        layout: MessageLayout,
        peer: int,
        tag: int,
        device: torch.device,
        group: dist.ProcessGroup,
        records: dist.ProcessGroup | None = None,
        streams: Streams | None = None,
    ) -> None:
        """`streams` are the device's."""
        self.layout = layout
        self._buffers = _slots(layout, device)
        self._sends = [dist.P2POp(dist.isend, buffer, peer, group) for buffer in self._buffers]
        self._lane = SendLane(streams or CudaStreams(device), self._start)
        self._records = GlooSender(layout.bare, peer, tag, records)

    @property
    def ready(self) -> bool:
        return self._records.ready

    def send(self, work: StageMessage) -> None:
        self._records.send(work)
        self._lane.send(lambda slot: self.layout.write(work, self._buffers[slot]))

    def warm_up(self) -> None:
        """Send a message per slot that nobody asks for; the other end's `warm_up` takes them. Returns at once."""
        for _ in range(SLOTS):
            self._lane.send(lambda slot: None)

    def drain(self) -> None:
        """Wait on the host until everything has been sent."""
        self._lane.drain()

    def close(self) -> None:
        self._records.close()

    def flush(self, limit_s: float) -> None:
        """Wait until what was sent has arrived. The group stays; its owner ends it.

        Raises:
            LinkClosed: the other end went away in the midst of a message.
        """
        self._records.flush(limit_s)
        if not self._records.broken:
            self._lane.drain()

    def _start(self, slot: int) -> Transfer:
        return _Transfer(self._sends[slot])


class NcclReceiver:
    """The receiving end of an edge from rank `peer`; see `NcclSender`.

    What was received is read on the stream that is current when it is received, and again at the next `receive`.
    """

    def __init__(
        self,
        layout: MessageLayout,
        peer: int,
        tag: int,
        device: torch.device,
        group: dist.ProcessGroup,
        records: dist.ProcessGroup | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.layout = layout
        self._buffers = _slots(layout, device)
        self._receives = [dist.P2POp(dist.irecv, buffer, peer, group) for buffer in self._buffers]
        self._lane = ReceiveLane(streams or CudaStreams(device), self._start)
        self._records = GlooReceiver(layout.bare, peer, tag, torch.device("cpu"), records)
        self._announced: deque[StageMessage] = deque()

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        self._lane.release()
        self._listen(wait_s)
        if not self._announced:
            return None
        return self.layout.attach(self._announced.popleft(), self._buffers[self._lane.take()])

    def warm_up(self) -> None:
        """Take what the other end's `warm_up` sends."""
        for _ in range(SLOTS):
            self._lane.announce()
            self._lane.take()
            self._lane.release()

    def notify(self, call: Callable[[], None]) -> None:
        self._records.notify(call)

    def close(self, limit_s: float = 0.0) -> None:
        self._announced.clear()
        self._records.close(limit_s)

    def _start(self, slot: int) -> Transfer:
        return _Transfer(self._receives[slot])

    def _listen(self, wait_s: float | None) -> None:
        """Take in records, as many as there are slots; wait for the first only. Mutates: self."""
        try:
            while len(self._announced) < SLOTS:
                work = self._records.receive(0.0 if self._announced else wait_s)
                if work is None:
                    return
                self._announced.append(work)
                self._lane.announce()
        except LinkClosed:  # what came before still counts
            if not self._announced:
                raise


def warm_up(sender: NcclSender, receiver: NcclReceiver) -> None:
    """Send and take messages that say nothing, on all ranks of a ring, and wait for them.

    A communicator connects its ranks at their first transfer; no later one may find its neighbour busy.
    """
    sender.warm_up()
    receiver.warm_up()
    sender.drain()
