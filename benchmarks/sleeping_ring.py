"""Rings of processes over TCP whose stages sleep for their cost: what `ring_schedule` and `ring_parallel` measure.

Embedding and output layer run and the embedded model's tensors travel; its blocks do not run.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import pairwise
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import report
from benchmarks.hop_trace import Trace, of_hop
from streamdiff import clock
from streamdiff.models.model import Model
from streamdiff.models.tiny import model as tiny
from streamdiff.pipeline.distributed.context_parallel import ContextGroup
from streamdiff.pipeline.distributed.link import FanOutReceiver, FanOutSender
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.planner.simulator import Figures, Setup, Stream, simulate
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.stage_forward import Tensors
from streamdiff.pipeline.runner.worker import Worker
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.pipeline.topology import StageTopology, connect, share_stages

CPU = torch.device("cpu")
LIMIT_S = 60.0  # for the ring to come to rest


@dataclass(frozen=True)
class Plan:
    """A round is as many chunks as there are stages or sessions, of all sessions together. Chunks finish in a pattern
    that comes back after a round, so only whole rounds give a rate that does not depend on how many there are; three
    agree to a hundredth. `warm_up` rounds go before them. Of `streams` None is as many as fill the ring."""

    stages: int = 4
    steps: int = 4
    forward_s: float = 0.2
    rounds: int = 3
    warm_up: int = 1
    kv_context: str = "matched"
    streams: int | None = None

    @property
    def sessions(self) -> int:
        """Those that fill a ring of `stages`, unless they are said: `clean` needs one per stage."""
        return self.streams or (self.stages if self.kv_context == "clean" else 1)

    @property
    def round(self) -> int:
        """Chunks of a round."""
        return max(self.stages, self.sessions)


class Sleeping(ModelRunner):
    """A stage that takes its time and changes nothing. Where `group` shares it, it sleeps for its share, block by
    block, and after each exchanges what a block does: as many bytes of queries, keys and values, and of the result."""

    def __init__(
        self, model: Model, place: StageTopology, forward_s: float, trace: Trace, group: ContextGroup | None = None
    ) -> None:
        super().__init__(model, CPU, place.stage, place.stages, group)
        self.seconds, self.trace, self.group = forward_s / place.stages / place.shares, trace, group
        self.never, self._leave_s = Event(), 0.0

    def forward(self, rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        came_s = clock.monotonic_s()
        tokens = self._forward.enter(given)
        begin_s = clock.monotonic_s()
        self.trace.layers_s.append(self._leave_s + begin_s - came_s)
        if self.group is None:
            self.never.wait(self.seconds)
        else:
            blocks = len(self.denoiser.blocks)
            for _ in range(blocks):
                self.never.wait(self.seconds / blocks)
                exchange(self.group, tokens.hidden)
        end_s = self.trace.forward(begin_s)
        result = self._forward.leave(tokens)  # all but the blocks
        self._leave_s = clock.monotonic_s() - end_s
        return result


def exchange(group: ContextGroup, hidden: Tensor) -> None:
    """What ranks that share a stage exchange in a block, for own tokens `[R, l, D]`. Heads are as many as ranks and as
    wide as it takes: the embedded model's six can be shared by two ranks, or three, and only the bytes count here."""
    heads = hidden.unflatten(2, (group.size, -1))
    query, _, _ = group.to_heads(heads, heads, heads)
    group.to_tokens(query)


class Done(NamedTuple):
    """A finished chunk: when its latents were done, how long after its admission, and whose it is."""

    at_s: float
    after_s: float
    session: int


class Ran(NamedTuple):
    """What a ring of processes came to: the head's figures, where a hop's time went, see `hop_trace.of_hop`, and what a
    block's exchange took, see `probe`. `stage_s` is the head's median of a forward, but for embedding and output."""

    figures: dict[str, float]
    hop: dict[str, float]
    probe: Sequence[float] = ()
    stage_s: float = 0.0


def measure(ring: RingExecutor, plan: Plan) -> dict[str, float]:
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
        rows, done = ring.turn(1.0)
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
    """One process of the ring, through all plans; of each this rank's `trace` and, where its stage is shared, `probe`;
    and the head's `figures`."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(days=3650)
    ranks = place.stages * place.shares
    dist.init_process_group("gloo", init_method=address, rank=place.rank, world_size=ranks, timeout=patience)
    whole = tiny.load_model(tiny.WEIGHTS, CPU)
    model = whole.part(*split_evenly(whole.blocks, place.stages)[place.stage])
    group = share_stages(place, model.spec, CPU)
    tokens, width = whole.denoiser.tokens(whole.spec.chunk_shape[1:]), whole.denoiser.width
    probed = None if group is None else probe(group, tokens // place.shares, width)
    results = []
    for number, plan in enumerate(plans):
        trace, figures = Trace(), dict[str, float]()
        stage = Sleeping(model, place, plan.forward_s, trace, group)
        links = connect(model, replace(place, ring=number), CPU) if ranks > 1 else None
        if links is not None and place.shares == 1:
            trace.watch(*links)
        if place.rank > 0 and links is not None:
            Worker(links[1], stage, links[0]).run()
        else:
            ring = RingExecutor(model, CPU, stage=stage, links=links)
            if links is not None and isinstance(links[0], FanOutSender):
                ring.worker.receiver = FanOutReceiver(ring.worker.receiver, links[0].others)
            figures = measure(ring, plan)
            ring.stop(LIMIT_S)
        results.append({"figures": figures, "trace": asdict(trace), "probe": probed})
    return results


PROBES = (0.5, 4.0)
"""Of a block's bytes, those that are tried, in multiples."""
_PROBE_SLEEP_S, _PROBE_TIMES = 0.005, 40


def probe(group: ContextGroup, tokens: int, width: int) -> list[float]:
    """Mean seconds of what a block exchanges, of `PROBES` times as many own tokens: each time after a sleep, as it
    comes in a stage."""
    found, never = list[float](), Event()
    for times in PROBES:
        hidden = torch.zeros(1, round(tokens * times), width)
        taken = []
        for _ in range(_PROBE_TIMES):
            never.wait(_PROBE_SLEEP_S)
            begin_s = clock.monotonic_s()
            exchange(group, hidden)
            taken.append(clock.monotonic_s() - begin_s)
        found.append(statistics.mean(taken))
    return found


def run_ring(stages: int, plans: Sequence[Plan], shares: int = 1) -> list[Ran]:
    """Every plan, run by a ring of so many processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.sleeping_ring", json.dumps([asdict(plan) for plan in plans])]
    ranks = [
        subprocess.Popen(
            [*command, f"{rank}/{stages}/{shares}/{port}"], stdout=subprocess.PIPE, text=True, cwd=report.ROOT
        )
        for rank in range(stages * shares)
    ]
    try:
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    by_rank = [json.loads(words.splitlines()[-1]) for words in said]
    ran = []
    for number, plan in enumerate(plans):
        traces = [results[number]["trace"] for results in by_rank]
        hop = of_hop(traces, plan.forward_s / stages) if stages > 1 and shares == 1 else {}
        head = by_rank[0][number]
        stage_s = statistics.median(end - begin for begin, end in head["trace"]["slept"])
        ran.append(Ran(head["figures"], hop, head["probe"] or (), stage_s))
    return ran


def ideal(plan: Plan, stages: int) -> Figures:
    """What the scheduler comes to where links, head and decoding cost nothing."""
    return simulated(plan, stages, plan.forward_s / stages)


def simulated(plan: Plan, stages: int, stage_s: float) -> Figures:
    """What the scheduler comes to where a forward takes `stage_s` on each stage, and nothing else costs anything."""
    streams = (Stream(plan.steps, plan.kv_context),) * plan.sessions
    return simulate(Setup(((stage_s,),) * stages, streams)).figures


def main(argv: Sequence[str]) -> None:
    """One rank: `[PLANS, RANK/STAGES/SHARES/PORT]`; prints its results."""
    plans, place = argv
    rank, stages, shares, port = map(int, place.split("/"))
    found = run_rank(StageTopology(rank, stages, shares=shares), port, [Plan(**plan) for plan in json.loads(plans)])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
