"""What rows in one forward save: CPU seconds per chunk of several sessions of the embedded model on one stage, with
`max_rows` 1 and more, in turns.

The sessions are never short of frame credit, so every forward has as many rows as it may. Each round plays all numbers
of rows one after the other; a round's ratio compares them under the same load of the machine. Nothing is decoded.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import report
from streamdiff.models.model import Model
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.model import load_model
from streamdiff.pipeline.executor import RingExecutor

SUMMARY = "CPU seconds per chunk of sessions that share forwards, beside those that do not."
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """`chunks` of each session are measured in each of `rounds`, after the window is full."""

    sessions: int = 8
    rows: tuple[int, ...] = (1, 2, 4, 8)
    chunks: int = 4
    rounds: int = 5
    steps: int = 4


def cpu_s() -> float:
    """Seconds that this process has computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def opened(model: Model, plan: Plan, max_rows: int) -> RingExecutor:
    """A ring whose sessions have a full window."""
    ring = RingExecutor(model, _CPU, max_rows)
    for session in range(plan.sessions):
        text = model.text.encode(model.text.examples[session % len(model.text.examples)])
        ring.open(session, text, seed=session, epoch=0, steps=plan.steps, kv_context="clean")
    play(ring, plan, model.spec.window_chunks("clean") + 1)
    return ring


def play(ring: RingExecutor, plan: Plan, chunks: int) -> tuple[float, float]:
    """Make so many more chunks of each session; CPU seconds per chunk, and the 95th percentile of the gaps between a
    session's chunks relative to their mean."""
    begun, left, ended = cpu_s(), chunks * plan.sessions, dict[int, list[float]]()
    while left > 0:
        for session in range(plan.sessions):
            ring.scheduler.set_frame_credit(session, 10 * ring.scheduler.chunk_frames)
        for row, _ in ring.turn()[1]:
            ended.setdefault(row.session, []).append(cpu_s())
            left -= 1
    gaps = [later - one for times in ended.values() for one, later in pairwise(times)]
    p95 = statistics.quantiles(gaps, n=20, method="inclusive")[-1] if len(gaps) > 1 else 0.0
    return (cpu_s() - begun) / (chunks * plan.sessions), p95


def measure(plan: Plan) -> dict[str, dict[str, report.Value]]:
    """By `max_rows`: medians over the rounds, and the ratio of chunks to those with the first number of rows."""
    torch.set_num_threads(1)
    model = load_model(EMBEDDED_WEIGHTS, _CPU)
    rings = {rows: opened(model, plan, rows) for rows in plan.rows}
    played = [{rows: play(ring, plan, plan.chunks) for rows, ring in rings.items()} for _ in range(plan.rounds)]
    first, found = plan.rows[0], dict[str, dict[str, report.Value]]()
    for rows in plan.rows:
        found[str(rows)] = {
            "cpu_ms_per_chunk": round(1000 * statistics.median(each[rows][0] for each in played), 2),
            "chunks_ratio": round(statistics.median(each[first][0] / each[rows][0] for each in played), 3),
            "p95_gap_ratio": round(statistics.median(each[rows][1] / each[first][1] for each in played), 3),
        }
    return found


def parse(argv: list[str] | None) -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_rows", description=SUMMARY)
    for name in ("sessions", "chunks", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Plan(), name), help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=list(Plan().rows), help="default: 1 2 4 8")
    parser.add_argument("--out", type=Path, help="JSON file to write (default: only print)")
    options = vars(parser.parse_args(argv))
    out, rows = options.pop("out"), tuple(options.pop("rows"))
    for name, value in [*options.items(), *(("rows", each) for each in rows)]:
        least = 2 if name == "chunks" else 1
        if value < least:
            parser.error(f"--{name} is {value}; at least {least} is needed")
    return Plan(rows=rows, **options), out


def main(argv: list[str] | None = None) -> int:
    plan, out = parse(argv)
    head = report.header(warm_up="chunks of each session until its window is full")
    results = measure(plan)
    print(report.table([{"max_rows": rows, **found} for rows, found in results.items()]))
    if out is not None:
        report.write_json(out, head, results, plan=asdict(plan))
        print(f"written: {report.public_path(str(out.resolve()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
