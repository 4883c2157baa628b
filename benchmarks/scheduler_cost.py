"""What a decision of the scheduler costs: median and 99th percentile of `next` and `returned` together.

8 sessions share a ring of 4 stages that is kept full. One sample is one forward: the rows are asked for, and the result
of the oldest forward is given back. Rooms are set before each, as the engine does, and are not part of the sample. Pure
Python on one core; the aim is a median under 100 microseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report
from streamdiff import clock
from streamdiff.pipeline.scheduler.kv_context import KV_CONTEXTS
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler
from streamdiff.pipeline.scheduler.step import MicroStep

SUMMARY = "Cost of one scheduling decision, in microseconds."
MIXED = "mixed"  # sessions of all KV contexts side by side
CONTEXTS = (*KV_CONTEXTS, MIXED)
CHUNK_FRAMES = 12
AIM_US = 100.0


@dataclass(frozen=True)
class Plan:
    """`decisions` are measured per KV context, after a tenth as many that are not."""

    sessions: int = 8
    stages: int = 4
    steps: int = 4
    max_rows: int = 1
    decisions: int = 20_000


def measure(plan: Plan, context: str) -> list[float]:
    """Microseconds of each decision."""
    scheduler = StreamBatchScheduler(stages=plan.stages, chunk_frames=CHUNK_FRAMES, max_rows=plan.max_rows)
    for session in range(plan.sessions):
        kv_context = KV_CONTEXTS[session % len(KV_CONTEXTS)] if context == MIXED else context
        scheduler.open(session, steps=plan.steps, kv_context=kv_context, epoch=0)
    ring: deque[list[MicroStep]] = deque()
    samples = []
    for decision in range(plan.decisions + plan.decisions // 10):
        for session in range(plan.sessions):
            scheduler.set_frame_credit(session, CHUNK_FRAMES * (1 + (7 * decision + 3 * session) % 5))
        back = ring.popleft() if len(ring) == plan.stages else []
        begin_s = clock.monotonic_s()
        for row in back:
            scheduler.returned(row)
        rows = scheduler.next()
        samples.append((clock.monotonic_s() - begin_s) * 1e6)
        ring.append(rows)
    return samples[plan.decisions // 10 :]


def figures(samples: Sequence[float]) -> dict[str, report.Value]:
    """Microseconds, to a hundredth."""
    hundredths = statistics.quantiles(samples, n=100, method="inclusive")
    return {"median_us": round(hundredths[49], 2), "p99_us": round(hundredths[98], 2)}


def parse(argv: list[str] | None) -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_cost", description=SUMMARY)
    for name, value in asdict(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--out", type=Path, help="JSON file to write (default: only print)")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    for name, value in options.items():
        least = 10 if name == "decisions" else 1
        if value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; at least {least} is needed")
    return Plan(**options), out


def main(argv: list[str] | None = None) -> int:
    plan, out = parse(argv)
    head = report.header(warm_up="a tenth as many decisions before those that count")
    results = {context: figures(measure(plan, context)) for context in CONTEXTS}
    print(report.table([{"kv_context": context, **found} for context, found in results.items()]))
    medians = [found["median_us"] for found in results.values()]
    met = all(isinstance(median, float) and median < AIM_US for median in medians)
    print(f"{'met   ' if met else 'MISSED'}  every median is under {AIM_US:.0f} microseconds")
    if out is not None:
        report.write_json(out, head, results, plan=asdict(plan), aim_us=AIM_US)
        print(f"written: {report.public_path(str(out.resolve()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
