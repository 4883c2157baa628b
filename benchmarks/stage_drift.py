"""How far the times of a ring's stages drift while it runs, and what moving blocks between stages would cost and gain.

    python -m benchmarks.stage_drift                     # 2 stages, ten minutes
    python -m benchmarks.stage_drift --stages 4 --seconds 600

Real processes over TCP run the embedded model, as many sessions in KV context `clean` as there are stages, without
decoding. Every rank keeps the seconds of each forward of its blocks, by chunk. Afterwards time is cut into windows, and
two rings are compared over them: one that keeps the split which the first window asks for, and one that moves blocks
before each window to the split which the window before asked for, if that was to gain enough. Splits are the planner's
(`planner.partition.split_blocks`), by each rank's own seconds per block, and cut as finely as those of `--model`, whose
bytes are copied too: the embedded model has four blocks only. Nothing moves in this run: gain and cost are computed. On
a machine with fewer cores than ranks, or with other work, it measures that work.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks import report
from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.models.tiny import model as tiny
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.planner.costs import Ceilings
from streamdiff.pipeline.planner.memory import Storage, block_weights
from streamdiff.pipeline.planner.model_sizes import ModelSizes, read_sizes, sizes_of
from streamdiff.pipeline.planner.partition import check_stages, split_blocks, split_evenly
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.stage_forward import Tensors
from streamdiff.pipeline.runner.worker import Worker
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.pipeline.topology import StageTopology, connect

SUMMARY = "Drift of stage times in a running ring, and what blocks that move between stages would cost and gain."
CPU = torch.device("cpu")
LIMIT_S = 60.0  # for the ring to come to rest
STEPS = 4
VALUE_BYTES = 2  # of the model whose blocks are counted

Split = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """`warm_up_s` go before the `seconds` that count, which are cut into windows of `window_s`. A move has to promise
    `least_gain`, a share of the slowest stage's time."""

    stages: int = 2
    seconds: float = 600.0
    window_s: float = 10.0
    warm_up_s: float = 10.0
    least_gain: float = 0.05


@dataclass(frozen=True)
class Timing:
    """One forward of a stage's blocks, which began at `at_s`."""

    at_s: float
    session: int
    chunk: int
    seconds: float


class Timed(ModelRunner):
    """A stage that keeps what its forwards take."""

    def __init__(self, model: Model, place: StageTopology) -> None:
        super().__init__(model, CPU, place.rank, place.stages)
        self.timings: list[Timing] = []

    def forward(self, rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        begin_s = clock.monotonic_s()
        result = super().forward(rows, given)
        self.timings.append(Timing(begin_s, rows[0].session, rows[0].chunk, clock.monotonic_s() - begin_s))
        return result


def run_rank(rank: int, port: int, plan: Plan) -> list[Timing]:
    """One process of the ring, from its start to its end."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(days=3650)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=plan.stages, timeout=patience)
    whole = tiny.load_model(tiny.WEIGHTS, CPU)
    model = whole.part(*split_evenly(whole.blocks, plan.stages)[rank])
    place = StageTopology(rank, plan.stages)
    stage = Timed(model, place)
    sender, receiver = connect(model, place, CPU)
    if rank > 0:
        Worker(receiver, stage, sender).run()
        return stage.timings
    ring = RingExecutor(model, CPU, stage=stage, links=(sender, receiver))
    text = torch.zeros(model.spec.text_shape)
    for session in range(plan.stages):
        ring.open(session, text, seed=session, epoch=0, steps=STEPS, kv_context="clean")
    end_s = clock.monotonic_s() + plan.warm_up_s + plan.seconds
    while clock.monotonic_s() < end_s:
        for session in range(plan.stages):
            ring.scheduler.set_frame_credit(session, 10**6)
        ring.turn(1.0)
    ring.stop(LIMIT_S)
    return stage.timings


def run_ring(plan: Plan) -> list[list[Timing]]:
    """The forwards of every stage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.stage_drift", json.dumps(asdict(plan)), "--rank"]
    ranks = [
        subprocess.Popen([*command, f"{rank}/{port}"], stdout=subprocess.PIPE, text=True, cwd=report.ROOT)
        for rank in range(plan.stages)
    ]
    try:
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [[Timing(*each) for each in json.loads(words.splitlines()[-1])] for words in said]


def chunk_seconds(timings: Iterable[Timing]) -> list[tuple[float, float]]:
    """(Begin, seconds of a forward on average) of each chunk on one stage, in the order in which they began."""
    chunks: dict[tuple[int, int], list[Timing]] = {}
    for each in timings:
        chunks.setdefault((each.session, each.chunk), []).append(each)
    means = [(own[0].at_s, sum(each.seconds for each in own) / len(own)) for own in chunks.values()]
    return sorted(means)


def windows_of(timings: Sequence[Sequence[Timing]], plan: Plan) -> list[list[float]]:
    """Of each whole window, and in it of each stage, a forward's seconds: the median of its chunks. Windows in which a
    stage began no chunk are left out."""
    chunks = [chunk_seconds(own) for own in timings]
    begin_s = max(own[0][0] for own in chunks) + plan.warm_up_s
    found = []
    for window in range(max(1, int(plan.seconds // plan.window_s))):
        from_s = begin_s + window * plan.window_s
        inside = [[s for at_s, s in own if from_s <= at_s < from_s + plan.window_s] for own in chunks]
        if all(inside):
            found.append([median(own) for own in inside])
    return found


@dataclass(frozen=True)
class Outcome:
    """Of the windows but the first: the slowest stage's seconds in a forward, on average, of the split that is kept,
    of one that moves after each window, and of one that knows each window before; how often that in the middle moves,
    and blocks that move in all."""

    kept_s: float
    moving_s: float
    foreseen_s: float
    moves: int
    moved_blocks: int


def slowest(split: Split, block_s: Sequence[float]) -> float:
    """Seconds of the slowest stage, by each rank's seconds for a block."""
    return max((end - first) * own for (first, end), own in zip(split, block_s, strict=True))


def best_split(blocks: int, block_s: Sequence[float]) -> Split:
    """The planner's, by each rank's seconds for a block."""
    least = min(block_s)
    return split_blocks([least] * blocks, [0.0] * len(block_s), [own / least for own in block_s])


def moved_blocks(before: Split, after: Split) -> int:
    """Blocks that another rank has afterwards."""
    return sum(
        end - first - max(0, min(end, later_end) - max(first, later))
        for (first, end), (later, later_end) in zip(before, after, strict=True)
    )


def compare(windows: Sequence[Sequence[float]], blocks: int, least_gain: float) -> Outcome:
    """What moving would have gained in these windows of a ring with even shares, were these `blocks` blocks."""
    each = blocks / len(windows[0])
    rates = [[seconds / each for seconds in window] for window in windows]
    kept = at = best_split(blocks, rates[0])
    moves = moved = 0
    times: list[tuple[float, float, float]] = []
    for before, now in pairwise(rates):
        asked = best_split(blocks, before)
        if slowest(asked, before) < (1 - least_gain) * slowest(at, before):
            moves, moved, at = moves + 1, moved + moved_blocks(at, asked), asked
        times.append((slowest(kept, now), slowest(at, now), slowest(best_split(blocks, now), now)))
    kept_s, moving_s, foreseen_s = (sum(column) / len(times) for column in zip(*times, strict=True))
    return Outcome(kept_s, moving_s, foreseen_s, moves, moved)


def block_bytes(sizes: ModelSizes, sessions: int) -> int:
    """Weights of a block, and its caches of so many sessions, which move together."""
    caches = VALUE_BYTES * sizes.cache_values(1, steps=STEPS, kv_context="clean")
    return block_weights(sizes, Storage(VALUE_BYTES)) + sessions * caches


def rows_of(windows: Sequence[Sequence[float]]) -> list[dict[str, report.Value]]:
    """Lines of the printed table: how the times of each stage drift."""
    return [
        {
            "stage": stage,
            "median_ms": 1e3 * median(own),
            "least_ms": 1e3 * min(own),
            "most_ms": 1e3 * max(own),
            "drift": max(own) / min(own) - 1,
        }
        for stage, own in enumerate(zip(*windows, strict=True))
    ]


def results_of(
    timings: Sequence[Sequence[Timing]], plan: Plan, sizes: ModelSizes, link_gbps: float
) -> tuple[dict[str, report.Json], str]:
    """Drift by stage, cost and gain of moving with blocks as of a model of these sizes; and the latter in words.

    Raises:
        ConfigError: too few windows.
    """
    windows = windows_of(timings, plan)
    if len(windows) < 3:
        raise ConfigError(f"there are {len(windows)} windows with chunks of all stages; 3 are needed: run it longer")
    found = compare(windows, sizes.blocks, plan.least_gain)
    moved = block_bytes(sizes, plan.stages)
    cost_s = found.moved_blocks * moved / (link_gbps * 1e9)
    gain, foreseen = 1 - found.moving_s / found.kept_s, 1 - found.foreseen_s / found.kept_s
    saved_s = gain * (len(windows) - 1) * plan.window_s  # a full ring is as fast as its slowest stage
    words = (
        f"the slowest stage would be {gain:.1%} faster with {found.moves} moves of blocks ({foreseen:.1%} with "
        f"foresight): {saved_s:.3g} s saved, {cost_s:.3g} s of copying {moved / 1e6:.3g} MB for each block"
    )
    return {
        "stages": rows_of(windows),
        "windows_ms": [[1e3 * seconds for seconds in window] for window in windows],
        "of_the_slowest_stage": asdict(found),
        "gain": gain,
        "gain_foreseen": foreseen,
        "block_bytes": moved,
        "copying_s": cost_s,
        "saved_s": saved_s,
    }, words


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stage_drift", description=SUMMARY)
    plain = Plan()
    parser.add_argument("--stages", type=int, default=plain.stages, help="ranks of the ring (default 2)")
    parser.add_argument("--seconds", type=float, default=plain.seconds, help="that count (default 600)")
    parser.add_argument("--window-s", type=float, default=plain.window_s, help="seconds of a window (default 10)")
    parser.add_argument("--warm-up-s", type=float, default=plain.warm_up_s, help="seconds before (default 10)")
    parser.add_argument("--least-gain", type=float, default=plain.least_gain, help="of a move (0.05)")
    parser.add_argument("--model", default="self-forcing", help="whose blocks are counted (default self-forcing)")
    parser.add_argument("--link-gbps", type=float, default=Ceilings().link_gbps, help="GB/s of a move (default 25)")
    parser.add_argument("--out", type=Path, help="JSON file to write (default: results/stage_drift_STAGES.json)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("plan", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        rank, port = map(int, options.rank.split("/"))
        own = run_rank(rank, port, Plan(**json.loads(options.plan)))
        print(json.dumps([list(asdict(each).values()) for each in own]), flush=True)
        return 0
    plan = Plan(options.stages, options.seconds, options.window_s, options.warm_up_s, options.least_gain)
    if plan.stages < 2 or plan.window_s <= 0 or plan.seconds < 3 * plan.window_s or options.link_gbps <= 0:
        parser.error("--stages must be at least 2, --seconds three windows, --window-s and --link-gbps above 0")
    try:
        check_stages(plan.stages, read_sizes("tiny").blocks)
        sizes = sizes_of(ModelConfig(name=options.model))
        head = report.header(warm_up=f"{plan.warm_up_s:g} s")
        timings = run_ring(plan)
        results, words = results_of(timings, plan, sizes, options.link_gbps)
    except ConfigError as error:
        parser.error(str(error))
    out = options.out or report.RESULTS / f"stage_drift_{plan.stages}.json"
    report.write_json(out, head, results, plan=asdict(plan), model=options.model, link_gbps=options.link_gbps)
    print(report.table(rows_of(windows_of(timings, plan))))
    print(words)
    print(f"written: {report.public_path(str(out.resolve()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
