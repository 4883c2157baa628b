"""What `streamdiff plan --gpus N` prints: every P stages x C ranks, and which is best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from streamdiff.commands.models import aligned, counted
from streamdiff.pipeline.planner.forecast import Expected
from streamdiff.pipeline.planner.model_sizes import ModelSizes
from streamdiff.pipeline.planner.parallel import Case, Comparison
from streamdiff.pipeline.planner.stage_layout import Workload


def as_tree(found: Comparison, sizes: ModelSizes, load: Workload) -> dict[str, object]:
    """The comparison as JSON: seconds, bytes."""
    machine = found.machine
    best = {"one": found.for_one, "sessions": found.for_asked, "many": found.for_many}
    return {
        "model": sizes.spec.name,
        "kv_context": load.kv_context,
        "steps": load.steps,
        "sessions": load.sessions,
        "gpu": asdict(machine.gpu),
        "gpus": machine.count,
        "link": machine.link,
        "estimate": True,
        "one_gpu": _tree(found.one_gpu, found),
        "cases": [_tree(case, found) for case in found.cases],
        "best": {name: None if case is None else [case.parallel, case.decode] for name, case in best.items()},
    }


def _tree(case: Case, found: Comparison) -> dict[str, object]:
    return {
        "parallel": case.parallel,
        "decode": case.decode,
        "forward_s": case.forward_s,
        "times_one_gpu": found.one_gpu.forward_s / case.forward_s,
        "one_session": asdict(case.alone),
        "sessions": asdict(case.asked),
        "as_many_as_fit": asdict(case.crowd),
        "sessions_that_fit": case.sessions_that_fit,
        "rank_bytes": list(case.rank_bytes),
    }


def as_text(found: Comparison, sizes: ModelSizes, load: Workload) -> Iterator[str]:
    """The comparison for people."""
    yield f"{sizes.spec.name} on {found.machine}: P stages x C ranks that share each, KV context {load.kv_context},"
    yield f"{load.steps} steps; an estimate, not a measurement (docs/plan.md)"
    yield ""
    counts = sorted({1, load.sessions})
    rows: list[tuple[str, ...]] = [
        ("PxC", "decode", "a forward", *(_title(count) for count in counts), "memory of a rank", "sessions that fit")
    ]
    rows += [_row(case, found, counts) for case in found.cases]
    if (found.machine.count, found.one_gpu.parallel) != (1, found.cases[0].parallel):
        rows.append(("one GPU", *_row(found.one_gpu, found, counts)[1:]))
    yield from aligned(rows)
    yield ""
    for count in counts:
        best = found.for_one if count == 1 else found.for_asked
        words = _in_words(best, None if best is None else _of(best, count), found)
        yield f"best for {counted(count, 'session')}: {words}"
    many = found.for_many
    if many is not None:
        yield f"best for as many as fit: {_in_words(many, many.crowd, found)}"
    yield f"rates: {found.machine.gpu.source}"


def reason(case: Case, expected: Expected, found: Comparison) -> str:
    """Why a case was taken, for one line."""
    return f"{_in_words(case, expected, found)}; of {len(found.cases)} ways to use {found.machine}, estimated"


def _row(case: Case, found: Comparison, counts: list[int]) -> tuple[str, ...]:
    low, high = min(case.rank_bytes) / 1e9, max(case.rank_bytes) / 1e9
    memory = f"{high:.3g} GB" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g} GB"
    ratio = found.one_gpu.forward_s / case.forward_s
    forward = f"{1e3 * case.forward_s:.3g} ms, {ratio:.2f}x"
    columns = (_figures(_of(case, count)) for count in counts)
    return case.parallel, case.decode, forward, *columns, memory, str(case.sessions_that_fit)


def _of(case: Case, count: int) -> Expected:
    return case.alone if count == 1 else case.asked


def _title(count: int) -> str:
    each = " each" if count > 1 else ""
    return f"{counted(count, 'session')}: frames/s{each}, latency, first"


def _figures(each: Expected) -> str:
    misfit = "" if each.fits else ", does not fit"
    return f"{each.frames_per_s:.3g}, {each.latency_s:.2g} s, {each.first_chunk_s:.2g} s{misfit}"


def _in_words(case: Case | None, expected: Expected | None, found: Comparison) -> str:
    if case is None or expected is None:
        return f"none fits; streamdiff plan --gpu {found.machine.gpu.name} says what would"
    place = {
        "dedicated": "decoding on one more GPU",
        "last": "decoding on the last stage",
    }
    where = place.get(case.decode, "decoding on the first rank")
    rate = expected.frames_per_s * expected.sessions
    together = "" if expected.sessions == 1 else f" of {expected.sessions} sessions together"
    return f"{case.parallel}, {where}: {rate:.3g} frames/s{together}"
