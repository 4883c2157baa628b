"""What the schedule and the transport of the ring are worth: processes over gloo whose stages sleep for their cost.

    python -m benchmarks.ring_schedule            # 1 and 4 stages, all KV contexts: a minute and a half

A whole forward costs `--forward-s` seconds of sleep, split evenly over the stages, so four ranks fit on two cores and
nothing but the schedule, the links and the head's own work is measured. **This says nothing about GPUs.** The embedded
model's tensors travel; its blocks are not run.
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
from streamdiff import clock
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.models.tiny import model as tiny
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.planner.model_sizes import read_facts
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

    def __init__(self, model: Model, place: StageTopology, forward_s: float) -> None:
        super().__init__(model, CPU, place.rank, place.stages)
        self.seconds = forward_s / place.stages
        self.never = Event()
        self.bare = replace(self._forward, denoiser=self.denoiser.part(0, 0))  # embedding and output layer alone

    def forward(self, rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        self.never.wait(self.seconds)
        return self.bare(given, (), self.attention)


class Done(NamedTuple):
    """A finished chunk: when its latents were done, how long after its admission, and whose it is."""

    at_s: float
    after_s: float
    session: int


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
            ring.scheduler.set_room(session, 10**6)
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


def run_rank(rank: int, stages: int, port: int, plans: Sequence[Plan]) -> list[dict[str, float]]:
    """One process of the ring, through all plans; the head's figures."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(days=3650)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=stages, timeout=patience)
    whole = tiny.load(tiny.WEIGHTS, CPU)
    model = whole.part(*split_evenly(whole.blocks, stages)[rank])
    results = []
    for number, plan in enumerate(plans):
        place = StageTopology(rank, stages, number)
        stage = Sleeping(model, place, plan.forward_s)
        links = connect(model, place, CPU) if stages > 1 else None
        if rank > 0 and links is not None:
            Worker(links[1], stage, links[0]).run()
            continue
        ring = RingExecutor(model, CPU, stage=stage, links=links)
        results.append(measure(ring, plan))
        ring.stop(LIMIT_S)
    return results


def run_ring(stages: int, plans: Sequence[Plan]) -> list[dict[str, float]]:
    """Figures of every plan, from a ring of so many processes."""
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
    figures: list[dict[str, float]] = json.loads(said[0].splitlines()[-1])
    return figures


def ideal(plan: Plan, stages: int) -> Figures:
    """What the scheduler comes to where links, head and decoding cost nothing."""
    streams = (Stream(plan.steps, plan.kv_context),) * plan.sessions
    return simulate(Setup(((plan.forward_s / stages,),) * stages, streams)).figures


def judged(plan: Plan, alone: dict[str, float], together: dict[str, float]) -> dict[str, Any]:
    """The figures of one stage and of `plan.stages`, and how much of the ideal they are."""
    best, best_alone = ideal(plan, plan.stages), ideal(plan, 1)
    rate, best_rate = together["chunks_per_s"] / alone["chunks_per_s"], best.chunks_per_s / best_alone.chunks_per_s
    latency = together["latency_s"] / best.latency_s
    return {
        "sessions": plan.sessions,
        "one_stage": alone,
        "stages": together,
        "rate_ratio": rate,
        "ideal_rate_ratio": best_rate,
        "latency_of_ideal": latency,
        "longest_gap_of_mean": together["longest_gap_s"] / together["mean_gap_s"],
        "ideal_longest_gap_of_mean": max(gap.longest_s / gap.mean_s for gap in best.gaps),
        "met": {"rate": rate >= RATE_AIM * best_rate, "latency": latency <= LATENCY_AIM},
    }


def compare(plan: Plan) -> dict[str, Any]:
    """One stage against `plan.stages`, every KV context."""
    plans = [replace(plan, kv_context=context) for context in KV_CONTEXTS]
    one, many = run_ring(1, plans), run_ring(plan.stages, plans)
    return {
        each.kv_context: judged(each, alone, together) for each, alone, together in zip(plans, one, many, strict=True)
    }


def verdicts(results: dict[str, Any]) -> list[str]:
    """One line per aim and KV context."""
    lines = []
    for context, found in results.items():
        rate, best, latency = found["rate_ratio"], found["ideal_rate_ratio"], found["latency_of_ideal"]
        texts = {
            "rate": f"{rate:.2f} times one stage's chunks; at least {RATE_AIM * best:.2f}, the ideal is {best:.2f}",
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_schedule", description=SUMMARY)
    plain = Plan()
    parser.add_argument("--stages", type=int, default=plain.stages, help="ranks of the larger ring (default 4)")
    parser.add_argument("--steps", type=int, choices=(1, 2, 4), default=plain.steps)
    parser.add_argument("--forward-s", type=float, default=plain.forward_s, help="seconds of a whole forward")
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
    if not (options.stages >= 2 and options.forward_s > 0 and options.rounds >= 1):
        parser.error("--stages must be at least 2, --rounds at least 1, --forward-s more than 0")
    try:
        check_stages(options.stages, read_facts("tiny").blocks)
    except ConfigError as error:
        parser.error(str(error))
    plan = Plan(options.stages, options.steps, options.forward_s, options.rounds)
    head = report.header(warm_up=f"{plan.warm_up} round of chunks")
    results = compare(plan)
    aims = {"rate_of_ideal": RATE_AIM, "latency_of_ideal": LATENCY_AIM}
    claim = "schedule and transport only; stages sleep"
    report.write_json(options.out, head, results, plan=asdict(plan), aims=aims, claim=claim)
    print(report.table(rows_of(results)))
    print("\n".join(verdicts(results)))
    print(f"written: {report.public_path(str(options.out.resolve()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
