"""What the schedule and the transport of the ring are worth: processes over TCP whose stages sleep for their cost.

    python -m benchmarks.ring_schedule            # 1 and 4 stages, all KV contexts, forwards of 200, 40 and 20 ms

A whole forward costs `--forward-s` seconds of sleep, split evenly over the stages, so four ranks fit on two cores and
nothing but the schedule, the links and the head's own work is measured, and each of them apart (`hop`). **This says
nothing about GPUs.** The embedded model's tensors travel, embedding and output layer run, its blocks do not.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.hop_trace import Trace, of_hop
from streamdiff import clock
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.models.tiny import model as tiny
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.planner.model_sizes import read_sizes
from streamdiff.pipeline.planner.partition import check_stages, split_evenly
from streamdiff.pipeline.planner.simulator import Figures, Setup, Stream, simulate
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.stage_forward import Tensors
from streamdiff.pipeline.runner.worker import Worker
from streamdiff.pipeline.scheduler.kv_context import KV_CONTEXTS
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.pipeline.topology import StageTopology, connect

SUMMARY = "1 against P stages that sleep for their cost: a measurement of schedule and transport, not of any device."
CPU = torch.device("cpu")
LIMIT_S = 60.0  # for the ring to come to rest
# What may be lost to transport and to the head's work: 3.7 times one stage's chunks where 4 times is the ideal, a chunk
# 15 % later than by the schedule alone.
RATE_AIM, LATENCY_AIM = 3.7 / 4, 1.15
QUICK_S, QUICK_RATE_AIM = 0.02, 3.5 / 4  # forwards so short may lose a little more
FORWARDS_S = (0.2, 0.04, 0.02)


@dataclass(frozen=True)
class Plan:
    """A round is as many chunks as there are stages, of all sessions together. Chunks finish in a pattern that comes
    back after a round, so only whole rounds give a rate that does not depend on how many there are; three agree to a
    hundredth. `warm_up` rounds go before them."""

    stages: int = 4
    steps: int = 4
    forward_s: float = 0.2
    rounds: int = 3
    warm_up: int = 1
    kv_context: str = "matched"

    @property
    def sessions(self) -> int:
        """As many as fill a ring of `stages`: `clean` needs one per stage."""
        return self.stages if self.kv_context == "clean" else 1


class Sleeping(ModelRunner):
    """A stage that takes its time and changes nothing."""

    def __init__(self, model: Model, place: StageTopology, forward_s: float, trace: Trace) -> None:
        super().__init__(model, CPU, place.rank, place.stages)
        self.seconds, self.trace = forward_s / place.stages, trace
        self.never = Event()

    def forward(self, rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        begin_s = clock.monotonic_s()
        self.never.wait(self.seconds)
        self.trace.forward(begin_s)
        return self._forward.leave(self._forward.enter(given))  # all but the blocks


class Done(NamedTuple):
    """A finished chunk: when its latents were done, how long after its admission, and whose it is."""

    at_s: float
    after_s: float
    session: int


class Ran(NamedTuple):
    """What a ring of processes came to: the head's figures, and where a hop's time went, see `hop_trace.of_hop`."""

    figures: dict[str, float]
    hop: dict[str, float]


def measure(ring: RingExecutor, plan: Plan) -> dict[str, float]:
    """Figures of the head, as `figures_of` has them; `first_chunk_s` and `second_chunk_s` count from the start."""
    text = torch.zeros(ring.stage.spec.text_shape)
    for session in range(plan.sessions):
        ring.open(session, text, seed=session, epoch=0, steps=plan.steps, kv_context=plan.kv_context)
    admitted: dict[tuple[int, int], float] = {}
    finished: list[Done] = []
    began_s = clock.monotonic_s()
    while len(finished) < plan.stages * (plan.warm_up + plan.rounds):
        for session in range(plan.sessions):
            ring.scheduler.set_frame_credit(session, 10**6)
        begin_s = clock.monotonic_s()
        rows, done = ring.turn(1.0)
        now_s = clock.monotonic_s()
        admitted |= {(row.session, row.chunk): begin_s for row in rows if row.step == 0}
        finished += [Done(now_s, now_s - admitted[row.session, row.chunk], row.session) for row, _ in done]
    first, second = finished[:2]
    return {
        **figures_of(finished, plan.stages * plan.warm_up),
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


def run_rank(rank: int, stages: int, port: int, plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """One process of the ring, through all plans; of each this rank's `trace`, and the head's `figures`."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(days=3650)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=stages, timeout=patience)
    whole = tiny.load_model(tiny.WEIGHTS, CPU)
    model = whole.part(*split_evenly(whole.blocks, stages)[rank])
    results = []
    for number, plan in enumerate(plans):
        place = StageTopology(rank, stages, number)
        trace = Trace()
        stage = Sleeping(model, place, plan.forward_s, trace)
        figures: dict[str, float] = {}
        links = None
        if stages > 1:
            sender, receiver = connect(model, place, CPU)
            links = trace.sender(sender), trace.receiver(receiver)
        if rank > 0 and links is not None:
            Worker(links[1], stage, links[0]).run()
        else:
            ring = RingExecutor(model, CPU, stage=stage, links=links)
            figures = measure(ring, plan)
            ring.stop(LIMIT_S)
        results.append({"figures": figures, "trace": asdict(trace)})
    return results


def run_ring(stages: int, plans: Sequence[Plan]) -> list[Ran]:
    """Every plan, run by a ring of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.ring_schedule", json.dumps([asdict(plan) for plan in plans]), "--rank"]
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
        traces = [results[number]["trace"] for results in by_rank]
        hop = of_hop(traces, plan.forward_s / stages) if stages > 1 else {}
        ran.append(Ran(by_rank[0][number]["figures"], hop))
    return ran


def ideal(plan: Plan, stages: int) -> Figures:
    """What the scheduler comes to where links, head and decoding cost nothing."""
    streams = (Stream(plan.steps, plan.kv_context),) * plan.sessions
    return simulate(Setup(((plan.forward_s / stages,),) * stages, streams)).figures


def judged(plan: Plan, alone: dict[str, float], ran: Ran) -> dict[str, Any]:
    """The figures of one stage and of `plan.stages`, and how much of the ideal they are."""
    together, best, best_alone = ran.figures, ideal(plan, plan.stages), ideal(plan, 1)
    rate, best_rate = together["chunks_per_s"] / alone["chunks_per_s"], best.chunks_per_s / best_alone.chunks_per_s
    latency = together["latency_s"] / best.latency_s
    aim = (QUICK_RATE_AIM if plan.forward_s <= QUICK_S else RATE_AIM) * best_rate
    return {
        "sessions": plan.sessions,
        "one_stage": alone,
        "stages": together,
        "hop": ran.hop,
        "rate_ratio": rate,
        "ideal_rate_ratio": best_rate,
        "latency_of_ideal": latency,
        "longest_gap_of_mean": together["longest_gap_s"] / together["mean_gap_s"],
        "ideal_longest_gap_of_mean": max(gap.longest_s / gap.mean_s for gap in best.gaps),
        "rate_aim": aim,
        "met": {"rate": rate >= aim, "latency": latency <= LATENCY_AIM},
    }


def compare(plan: Plan) -> dict[str, Any]:
    """One stage against `plan.stages`, every KV context."""
    contexts = (context for context in KV_CONTEXTS if context != "anchored")  # the embedded model has no sink
    plans = [replace(plan, kv_context=context) for context in contexts]
    one, many = run_ring(1, plans), run_ring(plan.stages, plans)
    return {
        each.kv_context: judged(each, alone.figures, ran) for each, alone, ran in zip(plans, one, many, strict=True)
    }


def verdicts(results: dict[str, Any]) -> list[str]:
    """One line per aim and KV context."""
    lines = []
    for context, found in results.items():
        rate, best, latency = found["rate_ratio"], found["ideal_rate_ratio"], found["latency_of_ideal"]
        texts = {
            "rate": f"{rate:.2f} times one stage's chunks; at least {found['rate_aim']:.2f}, the ideal is {best:.2f}",
            "latency": f"a chunk takes {latency:.2f} times as long as in the ideal; at most {LATENCY_AIM}",
        }
        lines += [f"{'met   ' if found['met'][name] else 'MISSED'}  {context}: {text}" for name, text in texts.items()]
    return lines


def rows_of(results: dict[str, Any]) -> list[dict[str, report.Value]]:
    """Lines of the printed table."""
    lines: list[dict[str, report.Value]] = []
    for context, found in results.items():
        for name in ("one_stage", "stages"):
            figures = found[name]
            ratio = found["rate_ratio"] if name == "stages" else None
            lines.append({"context": context, "sessions": found["sessions"], "ring": name, **figures, "ratio": ratio})
    return lines


def hops_of(results: dict[str, Any]) -> list[dict[str, report.Value]]:
    """Lines of the printed table of microseconds."""
    return [
        {"context": context, **{name: round(value) for name, value in found["hop"].items()}}
        for context, found in results.items()
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_schedule", description=SUMMARY)
    plain = Plan()
    parser.add_argument("--stages", type=int, default=plain.stages, help="ranks of the larger ring (default 4)")
    parser.add_argument("--steps", type=int, choices=(1, 2, 4), default=plain.steps)
    parser.add_argument(
        "--forward-s",
        type=float,
        nargs="+",
        default=FORWARDS_S,
        help="seconds of a whole forward, one or more",
    )
    parser.add_argument("--rounds", type=int, default=plain.rounds, help="measured rounds, of a chunk per stage each")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "ring_schedule.json", help="JSON file to write")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("plans", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        rank, stages, port = (int(part) for part in options.rank.split("/"))
        figures = run_rank(rank, stages, port, [Plan(**plan) for plan in json.loads(options.plans)])
        print(json.dumps(figures), flush=True)
        return 0
    if not (options.stages >= 2 and min(options.forward_s) > 0 and options.rounds >= 1):
        parser.error("--stages must be at least 2, --rounds at least 1, --forward-s more than 0")
    try:
        check_stages(options.stages, read_sizes("tiny").blocks)
    except ConfigError as error:
        parser.error(str(error))
    plans = [Plan(options.stages, options.steps, forward_s, options.rounds) for forward_s in options.forward_s]
    plan = plans[0]
    head = report.header(warm_up=f"{plan.warm_up} round of chunks")
    results = {f"{1000 * each.forward_s:g} ms": compare(each) for each in plans}
    aims = {"rate_of_ideal": RATE_AIM, "rate_of_ideal_at_20_ms": QUICK_RATE_AIM, "latency_of_ideal": LATENCY_AIM}
    claim = "schedule and transport only; stages sleep"
    report.write_json(options.out, head, results, plan=asdict(plan), aims=aims, claim=claim)
    for forward, found in results.items():
        print(f"\na forward of {forward}\n{report.table(rows_of(found))}\n{report.table(hops_of(found))}")
        print("\n".join(verdicts(found)))
    print(f"written: {report.public_path(str(options.out.resolve()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
