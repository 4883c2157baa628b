"""Where a hop's time goes: what each rank of a ring does itself, how long messages travel, how long ranks wait.

Used by `sleeping_ring`. All ranks are on one machine and read one clock.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamdiff import clock
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import StageMessage

Span = tuple[float, float]
"""From and to, in seconds."""


@dataclass
class Trace:
    """One rank's times, in the order in which they came."""

    sent: list[float] = field(default_factory=list)
    """When `send` was called, by message."""
    arrived: list[float] = field(default_factory=list)
    """When a message had been taken in, and at last the link's end. What came before the trace was there is missing."""
    waited: list[Span] = field(default_factory=list)
    """Calls of `receive` that might wait."""
    slept: list[Span] = field(default_factory=list)
    """The forwards' sleep."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of the process, at the end of each forward's sleep."""
    layers_s: list[float] = field(default_factory=list)
    """Seconds of layers between two forwards' sleeps: the first one's output layer and the second one's embedding."""

    def forward(self, begin_s: float) -> float:
        """A forward's sleep has ended; returns when. Mutates: self."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        end_s = clock.monotonic_s()
        self.slept.append((begin_s, end_s))
        self.cpu_s.append(used.ru_utime + used.ru_stime)
        return end_s

    def watch(self, sender: Sender, receiver: Receiver) -> None:
        """Trace a rank's ends of its edges. Nothing but `send` and `receive` takes a way around, as what is measured
        stands between two forwards. Mutates: both."""
        send, receive = sender.send, receiver.receive

        def traced_send(work: StageMessage) -> None:
            self.sent.append(clock.monotonic_s())
            send(work)

        def traced_receive(wait_s: float | None = 0.0) -> StageMessage | None:
            if wait_s == 0.0:
                return receive(wait_s)
            begin_s = clock.monotonic_s()
            work = receive(wait_s)
            self.waited.append((begin_s, clock.monotonic_s()))
            return work

        setattr(sender, "send", traced_send)  # noqa: B010
        setattr(receiver, "receive", traced_receive)  # noqa: B010
        receiver.notify(lambda: self.arrived.append(clock.monotonic_s()))


def of_hop(traces: Sequence[dict[str, Any]], stage_s: float) -> dict[str, float]:
    """Means per hop, in microseconds, of the ranks' traces (as dictionaries), the head's first; the first quarter is
    left out. A rank's sleep of `stage_s`, its own work and its waiting make up its share of a round."""
    ranks = [Trace(**trace) for trace in traces]
    own, waiting, overslept, cpu, layers = zip(*(_of_rank(rank, stage_s) for rank in ranks), strict=True)
    travelled: list[float] = []
    for rank, following in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
        travelled += travels(rank.sent, following.arrived)
    others = len(ranks) - 1
    seconds = {
        "head_own_us": own[0],
        "others_own_us": sum(own[1:]) / others,
        "embedding_us": layers[0],
        "output_layer_us": layers[-1],
        "transport_us": sum(travelled) / len(travelled),
        "head_waits_us": waiting[0],
        "others_wait_us": sum(waiting[1:]) / others,
        "overslept_us": sum(overslept) / len(ranks),
        "cpu_us": sum(cpu) / len(ranks),
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def travels(sent: Sequence[float], arrived: Sequence[float]) -> list[float]:
    """How long messages travelled over an edge, but for the first quarter. The last arrival is the link's end; the
    first ones may be missing, so both are counted from the end."""
    messages = min(len(sent), len(arrived) - 1)
    spans = [end - begin for begin, end in zip(sent[-messages:], arrived[-1 - messages : -1], strict=True)]
    return spans[messages // 4 :]


def _of_rank(rank: Trace, stage_s: float) -> tuple[float, float, float, float, float]:
    """Seconds per forward: own work, waiting, sleeping too long, processor, embedding and output layer."""
    first = len(rank.slept) // 4
    count = len(rank.slept) - 1 - first
    begin_s, end_s = rank.slept[first][1], rank.slept[-1][1]
    slept_s = sum(end - begin for begin, end in rank.slept[first + 1 :])
    waited_s = sum(end - begin for begin, end in rank.waited if begin_s <= begin and end <= end_s)
    cpu_s = rank.cpu_s[-1] - rank.cpu_s[first]
    own_s = end_s - begin_s - slept_s - waited_s
    layers_s = sum(rank.layers_s[first + 1 :])
    return own_s / count, waited_s / count, slept_s / count - stage_s, cpu_s / count, layers_s / count
