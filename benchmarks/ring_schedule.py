"""What the schedule and the transport of the ring are worth: processes over TCP whose stages sleep for their cost.

    python -m benchmarks.ring_schedule            # 1 and 4 stages, all KV contexts, forwards of 200, 40 and 20 ms

A whole forward costs `--forward-s` seconds of sleep, split evenly over the stages, so four ranks fit on two cores and
nothing but the schedule, the links and the head's own work is measured, and each of them apart (`hop`). **This says
nothing about GPUs.** The embedded model's tensors travel, embedding and output layer run, its blocks do not.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.sleeping_ring import Plan, Ran, ideal, run_ring, simulated
from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.model_sizes import read_sizes
from streamdiff.pipeline.planner.partition import check_stages

SUMMARY = "1 against P stages that sleep for their cost: a measurement of schedule and transport, not of any device."
# What may be lost to transport and to the head's work: 3.7 times one stage's chunks where 4 times is the ideal, a chunk
# 15 % later than by the schedule alone.
RATE_AIM, LATENCY_AIM = 3.7 / 4, 1.15
QUICK_S, QUICK_RATE_AIM = 0.02, 3.5 / 4  # forwards so short may lose a little more
FORWARDS_S = (0.2, 0.04, 0.02)


def judged(plan: Plan, alone: dict[str, float], ran: Ran) -> dict[str, Any]:
    """The figures of one stage and of `plan.stages`, and how much of the ideal they are."""
    together, best, best_alone = ran.figures, ideal(plan, plan.stages), ideal(plan, 1)
    rate, best_rate = together["chunks_per_s"] / alone["chunks_per_s"], best.chunks_per_s / best_alone.chunks_per_s
    # A sleep lasts longer than asked for, which is nothing that schedule, transport or the head could lose.
    slept_s = plan.forward_s / plan.stages + ran.hop.get("overslept_us", 0.0) / 1e6
    latency = together["latency_s"] / simulated(plan, plan.stages, slept_s).latency_s
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
    plans = [replace(plan, kv_context=context) for context in KV_CONTEXTS]
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
    """Measure every plan, write the result and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_schedule", description=SUMMARY)
    plain = Plan()
    parser.add_argument("--stages", type=int, default=plain.stages, help="ranks of the larger ring (default 4)")
    parser.add_argument("--steps", type=int, choices=(1, 2, 4), default=plain.steps)
    parser.add_argument("--forward-s", type=float, nargs="+", default=FORWARDS_S, help="seconds of a whole forward")
    parser.add_argument("--rounds", type=int, default=plain.rounds, help="measured rounds, of a chunk per stage each")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "ring_schedule.json", help="JSON file to write")
    options = parser.parse_args(argv)
    if not (options.stages >= 2 and min(options.forward_s) > 0 and options.rounds >= 1):
        parser.error("--stages must be at least 2, --rounds at least 1, --forward-s more than 0")
    try:
        check_stages(options.stages, read_sizes("tiny").blocks)
    except ConfigError as error:
        parser.error(str(error))
    plans = [Plan(options.stages, options.steps, forward_s, options.rounds) for forward_s in options.forward_s]
    head = report.header(warm_up=f"{plain.warm_up} round of chunks")
    results = {f"{1000 * each.forward_s:g} ms": compare(each) for each in plans}
    aims = {"rate_of_ideal": RATE_AIM, "rate_of_ideal_at_20_ms": QUICK_RATE_AIM, "latency_of_ideal": LATENCY_AIM}
    claim = "schedule and transport only; stages sleep"
    report.write_json(options.out, head, results, plan=asdict(plans[0]), aims=aims, claim=claim)
    for forward, found in results.items():
        lines = [report.table(rows_of(found)), report.table(hops_of(found)), *verdicts(found)]
        print(f"\na forward of {forward}\n" + "\n".join(lines))
    print(f"written: {report.public_path(str(options.out.resolve()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
