"""The part of `streamdiff plan` that is about a named GPU: what it is asked, and what is printed of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from streamdiff.commands.models import aligned, counted
from streamdiff.config import ModelConfig
from streamdiff.models import catalogue
from streamdiff.pipeline.planner import fit, gpus
from streamdiff.pipeline.planner.forecast import Expected, Forecast, Question, costs_on, forecast, offload_words
from streamdiff.pipeline.planner.gpus import Gpu
from streamdiff.pipeline.planner.memory import Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes
from streamdiff.pipeline.planner.stage_layout import Blocks, Workload
from streamdiff.pipeline.scheduler.kv_context import KV_CONTEXTS


@dataclass(frozen=True)
class GpuForecast:
    """A question about a GPU and its forecast. `misfit` says why one session does not fit, and what would."""

    gpu: Gpu
    question: Question
    forecast: Forecast
    quality: dict[str, str]
    misfit: str | None


def ask(
    gpu: Gpu,
    model: ModelConfig,
    sizes: ModelSizes,
    load: Workload,
    storage: Storage,
    *,
    decode: str,
    blocks: Blocks,
    fps: float | None,
    link: str | None,
) -> GpuForecast:
    """The forecast for one session and for the workload's, against `fps` (None: the model's own rate), with stages
    linked by `link` (None: the fastest)."""
    costs = {each: costs_on(gpu, sizes, replace(load, kv_context=each), storage, link) for each in KV_CONTEXTS}
    question = Question(sizes, costs, load, decode, storage, gpu.usable_bytes, fps or sizes.spec.native_fps)
    return GpuForecast(gpu, question, forecast(question), _quality(model.name), _misfit(gpu, model, question, blocks))


def _misfit(gpu: Gpu, model: ModelConfig, question: Question, blocks: Blocks) -> str | None:
    """Why one session does not fit on one of the ranks."""
    entry = catalogue.lookup(model.name)
    published = entry is not None and entry.weights is not None
    own = entry.autoencoder if entry is not None else ""
    place = question.decode if question.decode in ("last", "dedicated") else "head"
    load = replace(question.load, sessions=1)
    demand = fit.Demand(question.sizes, question.storage, blocks, place, load, own, model.vae, changeable=published)
    found = (fit.misfit(demand, row.rank, gpu.usable_bytes, gpu.title) for row in demand.memory())
    return next((text for text in found if text is not None), None)


def _quality(name: str) -> dict[str, str]:
    """By KV context, whether the model was trained for it, is known to work in it, or neither is known."""
    entry = catalogue.entries().get(name)
    if entry is None or entry.context is None:
        return dict.fromkeys(KV_CONTEXTS, "not known")
    works, trained = entry.context.works, entry.context.trained
    return {
        each: "trained for it" if each == trained else "known to work" if each in works else "not known"
        for each in KV_CONTEXTS
    }


# ---- what is printed -------------------------------------------------------------------------------------------


def as_tree(found: GpuForecast) -> dict[str, object]:
    """The forecast as JSON."""
    return {
        "gpu": asdict(found.gpu),
        "estimate": True,
        "published_figures_within_factor": gpus.FACTOR,
        "target_frames_per_s": found.question.target_fps,
        "expected": [asdict(each) for each in found.forecast.expected],
        "sessions_that_fit": found.forecast.most_sessions,
        "reaching": {str(count): found.forecast.reaching(count) for count in _counts(found)},
        "quality": found.quality,
        "misfit": found.misfit,
    }


def as_text(found: GpuForecast) -> Iterator[str]:
    """The forecast for people."""
    gpu, stages, target = found.gpu, found.question.load.stages, found.question.target_fps
    yield f"to expect of {stages} x {gpu.title}: an estimate, not a measurement (published figures of other engines,"
    yield f"docs/plan.md, lie within a factor of {gpus.FACTOR:g}); the target is {target:g} frames/s of each session"
    counts = _counts(found)
    rows = [
        ("", "KV context", *(counted(count, "session") for count in counts), "memory", "sessions that fit", "quality")
    ]
    for kv_context in found.question.costs:
        cases = [each for each in found.forecast.expected if each.kv_context == kv_context]
        most, memory = found.forecast.most_sessions[kv_context], f"{cases[0].nbytes / 1e9:.3g} GB"
        rows.append(("", kv_context, *map(_case, cases), memory, str(most), found.quality[kv_context]))
    yield from aligned(rows)
    for count in counts:
        verb = "reaches" if count == 1 else "reach"
        yield f"  {counted(count, 'session')} {verb} it in: {', '.join(found.forecast.reaching(count)) or 'none'}"
    if (words := offload_words(found.question.sizes, found.question.storage, found.question.load, gpu)) is not None:
        yield f"  {words}"
    if found.misfit is not None:
        yield f"  {found.misfit}"
    yield f"  rates: {gpu.source}"
    yield f"  shares of them: {gpu.shares_from}"


def _counts(found: GpuForecast) -> list[int]:
    return sorted({each.sessions for each in found.forecast.expected})


def _case(each: Expected) -> str:
    of_each, misfit = ", each" if each.sessions > 1 else "", "" if each.fits else ", does not fit"
    return f"{each.frames_per_s:.3g} frames/s{of_each}, first after {each.first_chunk_s:.2g} s{misfit}"
