"""What `streamdiff plan` prints, for people and as JSON: a plan, what to expect of a GPU, a comparison of rings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from streamdiff.commands.models import aligned, counted
from streamdiff.pipeline.planner import forecast
from streamdiff.pipeline.planner.forecast import Case, Comparison, Expected, GpuRing, Kind, offload_words
from streamdiff.pipeline.planner.memory import Memory
from streamdiff.pipeline.planner.model_sizes import ModelSizes
from streamdiff.pipeline.planner.partition import Layout, Workload
from streamdiff.pipeline.planner.simulator import Run, Setup

_PLACES = {
    "head": "on the head, rank 0",
    "last": "on the last rank",
    "dedicated": "on a rank of its own",
    "own-stream": "beside the head's stage on a stream of its own, taken to cost that stage nothing",
}
_DECODING = {"dedicated": "decoding on one more GPU", "last": "decoding on the last stage"}
_COLUMNS = ("weights", "caches", "activations", "decoding", "decode work", "total", "")


@dataclass(frozen=True)
class Forecast:
    """What to expect of a ring of GPUs, by KV context and number of sessions, and how many sessions fit by KV context.
    `misfit` says why one session does not fit, and what would."""

    ring: GpuRing
    target_fps: float
    expected: tuple[Expected, ...]
    most_sessions: dict[str, int]
    quality: dict[str, str]
    misfit: str | None

    @property
    def counts(self) -> list[int]:
        """Numbers of sessions that were asked for."""
        return sorted({each.sessions for each in self.expected})

    def reaching(self, sessions: int) -> tuple[str, ...]:
        """KV contexts in which so many sessions fit and reach the target rate."""
        return tuple(e.kv_context for e in self.expected if e.sessions == sessions and e.fits and e.reaches)


@dataclass(frozen=True)
class Plan:
    """A plan and its results: where times are from, layout, memory per rank, simulated run and, with a GPU, a
    forecast."""

    source: str
    sizes: ModelSizes
    load: Workload
    layout: Layout
    setup: Setup
    memory: tuple[Memory, ...]
    run: Run
    forecast: Forecast | None = None


def as_tree(found: Plan | Comparison) -> dict[str, object]:
    """As JSON: seconds, bytes, shares of time."""
    return _plan_tree(found) if isinstance(found, Plan) else _comparison_tree(found)


def as_text(found: Plan | Comparison) -> Iterator[str]:
    """Lines for people."""
    return _plan_text(found) if isinstance(found, Plan) else _comparison_text(found)


# ---- a plan ----------------------------------------------------------------------------------------------------


def _plan_tree(plan: Plan) -> dict[str, object]:
    layout, figures = plan.layout, plan.run.figures
    busy = [*figures.occupancy, figures.decode_occupancy]
    return {
        "model": plan.sizes.spec.name,
        "workload": asdict(plan.load),
        "times": plan.source,
        "ranks": [
            {
                "rank": row.rank,
                "role": row.role.split(),
                "blocks": list(layout.blocks[row.rank]) if row.rank < plan.load.stages else [],
                "forward_s": list(layout.stage_s[row.rank]) if row.rank < plan.load.stages else [],
                "occupancy": busy[row.rank],
                "bytes": {**row.parts, "total": row.total},
            }
            for row in plan.memory
        ],
        "decode": {"place": layout.decode, "seconds": layout.decode_s},
        "link_s": list(plan.setup.link_s),
        "figures": {
            **asdict(figures),
            "frames_per_s": figures.chunks_per_s * plan.sizes.spec.chunk_frames,
            "whole_forward_s": layout.forward_s,
        },
        **({"forecast": _forecast_tree(plan.forecast)} if plan.forecast is not None else {}),
    }


def _plan_text(plan: Plan) -> Iterator[str]:
    spec, load, layout, figures = plan.sizes.spec, plan.load, plan.layout, plan.run.figures
    whole_s = layout.forward_s
    worst = max(figures.gaps, key=lambda gap: gap.longest_s / gap.mean_s)
    unknown = "not known, counted as 0 (--decode-time says it)"
    yield (
        f"{spec.name}: {counted(load.stages, 'stage')}, {counted(load.sessions, 'session')}, KV context "
        f"{load.kv_context}, {counted(load.steps, 'step')}, up to {counted(load.max_rows, 'row')} per forward"
    )
    yield f"times: {plan.source}"
    yield ""
    rows = [_rank_row(plan, row) for row in plan.memory]
    yield from aligned([("rank", "blocks", "forward", "busy", *_COLUMNS), *rows])
    yield ""
    yield (f"decode: {_time(layout.decode_s) if layout.decode_s > 0 else unknown} per chunk, {_PLACES[layout.decode]}")
    yield ""
    yield (
        f"simulated, {counted(plan.setup.chunks, 'chunk')} per session, steady state; a whole forward takes "
        f"{_time(whole_s)}"
    )
    yield (
        f"  throughput   {figures.chunks_per_s:.4g} chunks/s = {figures.chunks_per_s * spec.chunk_frames:.4g} "
        f"frames/s, all sessions together ({figures.chunks_per_s * whole_s:.2f} chunks per whole forward)"
    )
    yield (
        f"  latency      {_time(figures.latency_s)} from admission to decoded, longest "
        f"{_time(figures.longest_latency_s)} ({figures.latency_s / whole_s:.2f} whole forwards)"
    )
    yield f"  first chunk  after {_time(figures.first_chunk_s)}, the second after {_time(figures.second_chunk_s)}"
    yield (
        f"  gaps         {_time(worst.mean_s)} between a session's finished chunks, longest {_time(worst.longest_s)} "
        f"({worst.longest_s / worst.mean_s:.2f} times the mean)"
    )
    if load.max_rows > 1:
        yield f"  rows         {figures.rows_per_forward:.2f} per forward"
    if plan.forecast is not None:
        yield ""
        yield from _forecast_text(plan.forecast)


def _rank_row(plan: Plan, row: Memory) -> tuple[str, ...]:
    """A rank of the table."""
    blocks, forward, busy = "none", "", plan.run.figures.decode_occupancy
    if row.rank < plan.load.stages:
        first, end = plan.layout.blocks[row.rank]
        blocks, forward = f"{first}-{end - 1}", _time(plan.layout.stage_s[row.rank][0])
        busy = plan.run.figures.occupancy[row.rank]
    return str(row.rank), blocks, forward, f"{busy:.0%}", *map(_size, (*row.parts.values(), row.total)), row.role


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


# ---- what to expect of a GPU -----------------------------------------------------------------------------------


def _forecast_tree(found: Forecast) -> dict[str, object]:
    return {
        "gpu": asdict(found.ring.gpu),
        "estimate": True,
        "published_figures_within_factor": forecast.FACTOR,
        "target_frames_per_s": found.target_fps,
        "expected": [asdict(each) for each in found.expected],
        "sessions_that_fit": found.most_sessions,
        "reaching": {str(count): found.reaching(count) for count in found.counts},
        "quality": found.quality,
        "misfit": found.misfit,
    }


def _forecast_text(found: Forecast) -> Iterator[str]:
    ring, gpu = found.ring, found.ring.gpu
    devices, target = f"{ring.load.stages} x {gpu.title}", f"{found.target_fps:g} frames/s of each session"
    yield f"to expect of {devices}: an estimate, not a measurement (published figures of other engines,"
    yield f"docs/plan.md, lie within a factor of {forecast.FACTOR:g}); the target is {target}"
    sessions = (counted(count, "session") for count in found.counts)
    rows = [("", "KV context", *sessions, "memory", "sessions that fit", "quality")]
    for kv_context, most in found.most_sessions.items():
        cases = [each for each in found.expected if each.kv_context == kv_context]
        memory = f"{cases[0].nbytes / 1e9:.3g} GB"
        rows.append(("", kv_context, *map(_case, cases), memory, str(most), found.quality[kv_context]))
    yield from aligned(rows)
    for count in found.counts:
        verb = "reaches" if count == 1 else "reach"
        yield f"  {counted(count, 'session')} {verb} it in: {', '.join(found.reaching(count)) or 'none'}"
    if (words := offload_words(ring.sizes, ring.storage, ring.load, gpu)) is not None:
        yield f"  {words}"
    if found.misfit is not None:
        yield f"  {found.misfit}"
    yield f"  rates: {gpu.source}"
    yield f"  shares of them: {gpu.shares_from}"


def _case(each: Expected) -> str:
    of_each, misfit = ", each" if each.sessions > 1 else "", "" if each.fits else ", does not fit"
    return f"{each.frames_per_s:.3g} frames/s{of_each}, first after {each.first_chunk_s:.2g} s{misfit}"


# ---- a comparison ----------------------------------------------------------------------------------------------


def _comparison_tree(found: Comparison) -> dict[str, object]:
    ring = found.one_gpu.ring
    best = {"one": found.best("alone"), "sessions": found.best("asked"), "many": found.best("crowd")}
    return {
        "model": ring.sizes.spec.name,
        "kv_context": ring.load.kv_context,
        "steps": ring.load.steps,
        "sessions": ring.load.sessions,
        "gpu": asdict(ring.gpu),
        "gpus": found.count,
        "link": ring.link,
        "estimate": True,
        "one_gpu": _case_tree(found.one_gpu, found),
        "cases": [_case_tree(case, found) for case in found.cases],
        "best": {name: None if case is None else [case.parallel, case.decode] for name, case in best.items()},
    }


def _case_tree(case: Case, found: Comparison) -> dict[str, object]:
    return {
        "parallel": case.parallel,
        "decode": case.decode,
        "forward_s": case.forward_s,
        "times_one_gpu": found.one_gpu.forward_s / case.forward_s,
        "one_session": asdict(case.expected["alone"]),
        "sessions": asdict(case.expected["asked"]),
        "as_many_as_fit": asdict(case.expected["crowd"]),
        "sessions_that_fit": case.sessions_that_fit,
        "rank_bytes": case.rank_bytes,
    }


def _comparison_text(found: Comparison) -> Iterator[str]:
    ring, context = found.one_gpu.ring, found.one_gpu.ring.load.kv_context
    counts = sorted({1, ring.load.sessions})
    yield f"{ring.sizes.spec.name} on {found.machine}: P stages x C ranks that share each, KV context {context},"
    yield f"{ring.load.steps} steps; an estimate, not a measurement (docs/plan.md)"
    yield ""
    titles = (f"{counted(n, 'session')}: frames/s{' each' if n > 1 else ''}, latency, first" for n in counts)
    rows = [("PxC", "decode", "a forward", *titles, "memory of a rank", "sessions that fit")]
    rows += [_case_row(case, found, counts) for case in found.cases]
    if (found.count, found.one_gpu.parallel) != (1, found.cases[0].parallel):
        rows.append(("one GPU", *_case_row(found.one_gpu, found, counts)[1:]))
    yield from aligned(rows)
    yield ""
    for count in counts:
        yield f"best for {counted(count, 'session')}: {best_words(found, 'alone' if count == 1 else 'asked')}"
    if found.best("crowd") is not None:
        yield f"best for as many as fit: {best_words(found, 'crowd')}"
    yield f"rates: {ring.gpu.source}"


def _case_row(case: Case, found: Comparison, counts: list[int]) -> tuple[str, ...]:
    low, high = (f"{size(case.rank_bytes) / 1e9:.3g}" for size in (min, max))
    forward = f"{1e3 * case.forward_s:.3g} ms, {found.one_gpu.forward_s / case.forward_s:.2f}x"
    columns = (
        f"{each.frames_per_s:.3g}, {each.latency_s:.2g} s, {each.first_chunk_s:.2g} s"
        + ("" if each.fits else ", does not fit")
        for each in (case.expected["alone" if count == 1 else "asked"] for count in counts)
    )
    memory = f"{high} GB" if low == high else f"{low} to {high} GB"
    return case.parallel, case.decode, forward, *columns, memory, str(case.sessions_that_fit)


def best_words(found: Comparison, kind: Kind) -> str:
    """The best case of this kind of sessions, for one line."""
    case = found.best(kind)
    if case is None:
        return f"none fits; streamdiff plan --gpu {found.one_gpu.ring.gpu.name} says what would"
    expected = case.expected[kind]
    where = _DECODING.get(case.decode, "decoding on the first rank")
    together = "" if expected.sessions == 1 else f" of {expected.sessions} sessions together"
    return f"{case.parallel}, {where}: {expected.together:.3g} frames/s{together}"
