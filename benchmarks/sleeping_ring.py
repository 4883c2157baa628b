"""Rings of processes over TCP whose stages sleep for their cost: what `ring_schedule` measures.

Embedding and output layer run and the embedded model's tensors travel; its blocks do not run.
"""

from __future__ import annotations

import json
import resource
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import report
from streamdiff import clock
from streamdiff.core import MicroStep
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.link import Receiver
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.planner.simulator import Figures, Setup, Stream, simulate
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.graphs import Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.topology import StageTopology, connect_stage
from training import embedded as tiny

CPU = torch.device("cpu")
LIMIT_S = 60.0  # for the ring to come to rest


@dataclass(frozen=True)
class Plan:
    """A round is as many chunks as there are stages or sessions, of all sessions together. Chunks finish in a pattern
    that comes back after a round, so only whole rounds give a rate that does not depend on how many there are; three
    agree to a hundredth. `warm_up` rounds go before them."""

    stages: int = 4
    steps: int = 4
    forward_s: float = 0.2
    rounds: int = 3
    warm_up: int = 1
    kv_context: str = "same_step"

    @property
    def sessions(self) -> int:
        """Those that fill a ring of `stages`: `clean` needs one per stage."""
        return self.stages if self.kv_context == "clean" else 1

    @property
    def round(self) -> int:
        """Chunks of a round."""
        return max(self.stages, self.sessions)


@dataclass
class Trace:
    """One rank's times, spans in seconds from and to, in the order in which they came."""

    slept: list[tuple[float, float]] = field(default_factory=list)
    """The forwards' sleep."""
    waited: list[tuple[float, float]] = field(default_factory=list)
    """Calls of `receive` that might wait."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of the process, at the end of each forward's sleep."""

    def watch(self, receiver: Receiver) -> None:
        """Note when the rank waits for a message. Mutates: receiver."""
        receive = receiver.receive

        def traced(wait_s: float | None = 0.0) -> StageMessage | None:
            if wait_s == 0.0:
                return receive(wait_s)
            begin_s = clock.monotonic_s()
            work = receive(wait_s)
            self.waited.append((begin_s, clock.monotonic_s()))
            return work

        setattr(receiver, "receive", traced)  # noqa: B010

    def per_forward(self, stage_s: float) -> tuple[float, float, float, float]:
        """Seconds of a forward: own work, waiting, sleeping longer than `stage_s`, processor; the first quarter is left
        out."""
        first = len(self.slept) // 4
        count, begin_s, end_s = len(self.slept) - 1 - first, self.slept[first][1], self.slept[-1][1]
        slept_s = sum(end - begin for begin, end in self.slept[first + 1 :])
        waited_s = sum(end - begin for begin, end in self.waited if begin_s <= begin and end <= end_s)
        own_s, cpu_s = end_s - begin_s - slept_s - waited_s, self.cpu_s[-1] - self.cpu_s[first]
        return own_s / count, waited_s / count, slept_s / count - stage_s, cpu_s / count


class Sleeping(ModelRunner):
    """A stage that takes its time and changes nothing."""

    def __init__(self, model: Model, place: StageTopology, forward_s: float, trace: Trace) -> None:
        super().__init__(model, CPU, place.stage, place.stages)
        self.seconds, self.trace, self.never = forward_s / place.stages, trace, Event()

    def forward(self, rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        tokens = self.enter(given)
        begin_s = clock.monotonic_s()
        self.never.wait(self.seconds)
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.trace.slept.append((begin_s, clock.monotonic_s()))
        self.trace.cpu_s.append(used.ru_utime + used.ru_stime)
        return self.leave(tokens)  # all but the blocks


class Done(NamedTuple):
    """A finished chunk: when its latents were done, how long after its admission, and whose it is."""

    at_s: float
    after_s: float
    session: int


class Ran(NamedTuple):
    """What a ring of processes came to: the head's figures, and where a hop's time went, see `hop_of`."""

    figures: dict[str, float]
    hop: dict[str, float]


def hop_of(ranks: Sequence[Trace], stage_s: float) -> dict[str, float]:
    """Means per forward, in microseconds, of the ranks' traces, the head's first. A rank's sleep of `stage_s`, its own
    work and its waiting make up its share of a round."""
    own, waits, overslept, cpu = zip(*(rank.per_forward(stage_s) for rank in ranks), strict=True)
    seconds = {
        "head_own_us": own[0],
        "others_own_us": statistics.mean(own[1:]),
        "head_waits_us": waits[0],
        "others_wait_us": statistics.mean(waits[1:]),
        "overslept_us": statistics.mean(overslept),
        "cpu_us": statistics.mean(cpu),
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def measure(ring: Ring, plan: Plan) -> dict[str, float]:
    """Figures of the head, as `figures_of` has them; `first_chunk_s` and `second_chunk_s` count from the start."""
    text = torch.zeros(ring.stage.spec.text_shape)
    for session in range(plan.sessions):
        ring.open(session, text, seed=session, epoch=0, steps=plan.steps, kv_context=plan.kv_context)
        ring.scheduler.set_frame_credit(session, 10**9)  # nobody watches
    admitted: dict[tuple[int, int], float] = {}
    finished: list[Done] = []
    began_s = clock.monotonic_s()
    while len(finished) < plan.round * (plan.warm_up + plan.rounds):
        begin_s = clock.monotonic_s()
        rows, done = ring.step_latents(1.0)
        now_s = clock.monotonic_s()
        admitted |= {(row.session, row.chunk): begin_s for row in rows if row.step == 0}
        finished += [Done(now_s, now_s - admitted[row.session, row.chunk], row.session) for row, _ in done]
    first, second = finished[:2]
    return {
        **figures_of(finished, plan.round * plan.warm_up),
        "first_chunk_s": first.at_s - began_s,
        "second_chunk_s": second.at_s - began_s,
    }


def figures_of(finished: Sequence[Done], warm_up: int) -> dict[str, float]:
    """Chunks per second of all sessions, a chunk's seconds from admission to latents, and the seconds between chunks of
    one session. The last chunk of the warm-up is where measuring begins."""
    begin_s, measured = finished[warm_up - 1].at_s, finished[warm_up:]
    times = [[done.at_s for done in finished if done.session == n] for n in {done.session for done in finished}]
    gaps = [later - earlier for own in times for earlier, later in pairwise(own) if later > begin_s]
    return {
        "chunks_per_s": len(measured) / (measured[-1].at_s - begin_s),
        "latency_s": sum(done.after_s for done in measured) / len(measured),
        "mean_gap_s": sum(gaps) / len(gaps),
        "longest_gap_s": max(gaps),
    }


def run_rank(place: StageTopology, port: int, plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """One process of the ring, through all plans; of each this rank's `trace`, and the head's `figures`."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(days=3650)
    dist.init_process_group("gloo", init_method=address, rank=place.rank, world_size=place.stages, timeout=patience)
    whole = tiny.load_model(tiny.WEIGHTS, CPU)
    model = whole.part(*split_evenly(whole.blocks, place.stages)[place.stage])
    results = []
    for number, plan in enumerate(plans):
        trace, figures = Trace(), dict[str, float]()
        parts = connect_stage(model, replace(place, ring=number), CPU)
        parts = parts._replace(stage=Sleeping(model, place, plan.forward_s, trace))
        if parts.links is not None:
            trace.watch(parts.links[1])
        if place.rank > 0:
            parts.worker().run()
        else:
            ring = Ring(model, CPU, parts=parts)
            figures = measure(ring, plan)
            ring.stop(LIMIT_S)
        results.append({"figures": figures, "trace": asdict(trace)})
    return results


def run_ring(stages: int, plans: Sequence[Plan]) -> list[Ran]:
    """Every plan, run by a ring of so many processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.sleeping_ring", json.dumps([asdict(plan) for plan in plans])]
    ranks = [
        subprocess.Popen([*command, f"{rank}/{stages}/{port}"], stdout=subprocess.PIPE, text=True, cwd=report.ROOT)
        for rank in range(stages)
    ]
    try:
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    by_rank = [json.loads(words.splitlines()[-1]) for words in said]
    ran = []
    for number, plan in enumerate(plans):
        traces = [Trace(**results[number]["trace"]) for results in by_rank]
        hop = hop_of(traces, plan.forward_s / stages) if stages > 1 else {}
        ran.append(Ran(by_rank[0][number]["figures"], hop))
    return ran


def ideal(plan: Plan, stages: int) -> Figures:
    """What the scheduler comes to where links, head and decoding cost nothing."""
    return simulated(plan, stages, plan.forward_s / stages)


def simulated(plan: Plan, stages: int, stage_s: float) -> Figures:
    """What the scheduler comes to where a forward takes `stage_s` on each stage, and nothing else costs anything."""
    streams = (Stream(plan.steps, plan.kv_context),) * plan.sessions
    return simulate(Setup(((stage_s,),) * stages, streams)).figures


def main(argv: Sequence[str]) -> None:
    """One rank: `[PLANS, RANK/STAGES/PORT]`; prints its results."""
    plans, place = argv
    rank, stages, port = map(int, place.split("/"))
    found = run_rank(StageTopology(rank, stages), port, [Plan(**plan) for plan in json.loads(plans)])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
