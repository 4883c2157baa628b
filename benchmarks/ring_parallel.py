"""P stages of C ranks that share each against one rank, with stages that sleep: `ring_schedule --parallel 1x4,2x2,4x1`.

With C ranks a forward's sleep is 1/C of the work, and after every block its ranks exchange what the embedded model's
block does, over gloo. The planner's model of that (`planner.costs.Exchange`) is checked on the way: it is fitted to
exchanges of half the bytes and of four times as many, each after a sleep; a stage's time follows from it, from that the
simulator's chunks per second, and both are compared with what the processes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.sleeping_ring import PROBES, Plan, Ran, ideal, run_ring, simulated
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.costs import Exchange
from streamdiff.pipeline.planner.model_sizes import read_sizes
from streamdiff.pipeline.planner.partition import check_stages

AIMS = {"1x4": 3.3}
"""Times one rank's chunks, of one stream with forwards of 200 ms or more."""
_AIMED_S = 0.2
_FLOAT32 = 4


def parse(text: str) -> tuple[tuple[int, int], ...]:
    """`1x4,2x2` as stages and ranks that share each.

    Raises:
        ConfigError: it is not of that form, or the embedded model cannot be split so.
    """
    sizes, found = read_sizes("tiny"), list[tuple[int, int]]()
    for word in text.split(","):
        parts = word.split("x")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
            raise ConfigError(f"--parallel is {text!r}, but must be a list of PxC, as 1x4,2x2,4x1")
        stages, shares = map(int, parts)
        check_stages(stages, sizes.blocks)
        per_frame = sizes.tokens // sizes.spec.chunk_latents
        if per_frame % shares or sizes.width % shares:
            raise ConfigError(f"--parallel has {word}, but {shares} ranks cannot share {per_frame} tokens of a frame")
        found.append((stages, shares))
    return tuple(found)


def exchange_of(probe: Sequence[float], nbytes: float, ranks: int) -> Exchange:
    """The planner's model of an exchange, from seconds of a block's two with `PROBES` times `nbytes` in all, of which
    each of `ranks` ranks keeps its part."""
    less, more = probe
    sent = nbytes * (ranks - 1) / ranks * (PROBES[1] - PROBES[0])
    gbps = sent / max(more - less, 1e-9) / 1e9
    floor_s = less / 2 - nbytes * PROBES[0] / 2 * (ranks - 1) / ranks / (gbps * 1e9)
    return Exchange(max(floor_s, 0.0), gbps)


def block_exchange(shares: int, probe: Sequence[float]) -> tuple[Exchange, float]:
    """What the ranks that share a stage exchange by, and seconds of what a block exchanges."""
    sizes = read_sizes("tiny")
    tensor = sizes.tokens * sizes.width * _FLOAT32 / shares
    model = exchange_of(probe, 4 * tensor, shares)
    return model, model.seconds(3 * tensor, shares) + model.seconds(tensor, shares)


def judged(plan: Plan, shares: int, alone: dict[str, float], ran: Ran) -> dict[str, Any]:
    """Figures of `plan.stages` stages of `shares` ranks beside one rank's, and what the simulator said of them."""
    blocks, name = read_sizes("tiny").blocks, f"{plan.stages}x{shares}"
    model, block_s = block_exchange(shares, ran.probe) if shares > 1 else (Exchange(0.0, 1.0), 0.0)
    stage_s = plan.forward_s / plan.stages / shares + blocks / plan.stages * block_s
    forecast, rate = simulated(plan, plan.stages, stage_s), ran.figures["chunks_per_s"] / alone["chunks_per_s"]
    aim = AIMS.get(name) if plan.sessions == 1 and plan.forward_s >= _AIMED_S else None
    return {
        "sessions": plan.sessions,
        "one_rank": alone,
        "ranks": ran.figures,
        "rate_ratio": rate,
        "simulated_rate_ratio": forecast.chunks_per_s / ideal(plan, 1).chunks_per_s,
        "rate_of_simulated": ran.figures["chunks_per_s"] / forecast.chunks_per_s,
        "latency_of_simulated": ran.figures["latency_s"] / forecast.latency_s,
        "stage_ms": 1e3 * ran.stage_s,
        "simulated_stage_ms": 1e3 * stage_s,
        "exchange_floor_us": 1e6 * model.floor_s if shares > 1 else None,
        "exchange_gbps": model.gbps if shares > 1 else None,
        "rate_aim": aim,
        "met": None if aim is None else rate >= aim,
    }


def compare(plan: Plan, splits: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """One rank against every split, with one stream and with as many as the largest has ranks; KV context `clean`."""
    streams = sorted({1, max(stages * shares for stages, shares in splits)})
    plans = [replace(plan, stages=1, kv_context="clean", streams=count) for count in streams]
    alone = dict(zip(streams, run_ring(1, plans), strict=True))
    results: dict[str, Any] = {}
    for stages, shares in splits:
        mine = [replace(each, stages=stages) for each in plans]
        for each, ran in zip(mine, run_ring(stages, mine, shares), strict=True):
            count = each.sessions
            label = f"{stages}x{shares}, {count} stream{'s' if count > 1 else ''}"
            results[label] = judged(each, shares, alone[count].figures, ran)
    return results


_TOLD = (
    "rate_ratio", "simulated_rate_ratio", "rate_of_simulated", "latency_of_simulated", "stage_ms", "simulated_stage_ms",
)  # fmt: skip


def rows_of(results: dict[str, Any]) -> list[dict[str, report.Value]]:
    """Lines of the printed table."""
    return [
        {
            "case": label,
            "chunks_per_s": found["ranks"]["chunks_per_s"],
            "latency_s": found["ranks"]["latency_s"],
            "first_chunk_s": found["ranks"]["first_chunk_s"],
            **{name: found[name] for name in _TOLD},
        }
        for label, found in results.items()
    ]


def verdicts(results: dict[str, Any]) -> list[str]:
    """A line for each aim, and how near the simulator came."""
    lines = []
    for label, found in results.items():
        if found["met"] is not None:
            word, rate = "met   " if found["met"] else "MISSED", found["rate_ratio"]
            lines.append(f"{word}  {label}: {rate:.2f} times one rank's chunks; at least {found['rate_aim']:g}")
    off = [found["rate_of_simulated"] for found in results.values()]
    return [
        *lines,
        f"chunks per second through the simulator's: {min(off):.2f} to {max(off):.2f}, median {median(off):.2f}",
    ]
