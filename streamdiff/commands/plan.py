"""What `streamdiff plan` does: checks, plans, simulates, and prints a plan, what to expect of a GPU or a comparison of
rings, for people and as JSON; and what `serve --gpus` takes of them. Knows nothing about the command line itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.child_process import environment
from streamdiff.commands.jobs import PlanJob, ServeJob
from streamdiff.commands.models import aligned, counted
from streamdiff.config import Config, ModelConfig
from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.models import catalogue
from streamdiff.models.spec import choose_steps
from streamdiff.pipeline.planner import forecast as gpu_forecast
from streamdiff.pipeline.planner import memory, partition, simulator
from streamdiff.pipeline.planner.costs import Ceilings, Costs, estimate, in_proportion, read_profile
from streamdiff.pipeline.planner.memory import Demand, Memory, Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes, sizes_with_window
from streamdiff.pipeline.planner.partition import Layout, Workload
from streamdiff.pipeline.planner.simulator import Run, Setup

DTYPES = {name: size for size, name in gpu_forecast.DTYPES.items()}
CHUNKS = 100
_CEILINGS = ("tflops", "gbps", "link_gbps")
# Options of which one of the first does not go with one of the second, and why.
_APART = (
    (("stage_times",), ("profile",), "times come from one of them"),
    ((*_CEILINGS, "gpu"), ("stage_times", "profile"), "it is for the estimate where no times are given"),
    (("gpu",), _CEILINGS, "the GPU's own are known"),
    (
        ("stages", "stage_times", "profile", "link_time", "decode_time", "trace", "plot", "fps"),
        ("gpus",),
        "several rings are compared",
    ),
)
_PLACES = {
    "head": "on the head, rank 0",
    "last": "on the last rank",
    "dedicated": "on a rank of its own",
    "own-stream": "beside the head's stage on a stream of its own, taken to cost that stage nothing",
}
_DECODING = {"dedicated": "decoding on one more GPU", "last": "decoding on the last stage"}


@dataclass(frozen=True)
class Forecast:
    """What to expect of a ring of GPUs, by KV context and number of sessions, and how many sessions fit by KV context.
    `misfit` says why one session does not fit, and what would."""

    ring: gpu_forecast.GpuRing
    target_fps: float
    expected: tuple[gpu_forecast.Expected, ...]
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


def run(model: ModelConfig, job: PlanJob) -> int:
    """Plan, print the plan, and write the trace and plot where the job has them; returns the exit status.

    Raises:
        ConfigError: something cannot be planned; nothing is computed or written then.
    """
    found = make(model, job) if job.gpus is None else compare(model, job)
    if isinstance(found, Plan):
        with exit_on_sigterm():
            if job.trace is not None:
                simulator.write_trace(job.trace, found.run.jobs, found.load.stages)
            if job.plot is not None:
                simulator.write_plot(job.plot, found.run.jobs, found.load.stages)
    print(json.dumps(as_tree(found), indent=2) if job.as_json else "\n".join(as_text(found)))
    return 0


def make(model: ModelConfig, job: PlanJob) -> Plan:
    """The plan for `model` (its name, steps, KV context, window, sink and way to quantise count).

    Raises:
        ConfigError: something cannot be planned.
    """
    sizes, load, storage = _settled(model, job)
    ring = _ring(job, sizes, load, storage)
    if job.stage_times is not None:
        source, layout = "stage times given by hand; blocks spread evenly", _by_hand(job, sizes, load)
    else:
        costs = _costs(job, sizes, load, storage) if ring is None else ring.costs
        if job.decode_time is not None:
            costs = replace(costs, decode_s=job.decode_time)
        if job.link_time is not None:
            costs = replace(costs, link_s=job.link_time, flow_s=job.link_time)
        source, layout = costs.source, partition.choose_layout(costs, load, job.decode_rank)
    setup = gpu_forecast.ring_setup(sizes, load, layout, job.chunks or CHUNKS)
    ranks = Demand(sizes, storage, layout.blocks, layout.decode, load).memory()
    found = None if ring is None else _forecast(ring, model, layout, job.fps or sizes.spec.native_fps)
    return Plan(source, sizes, load, layout, setup, ranks, simulator.simulate(setup), found)


def compare(model: ModelConfig, job: PlanJob) -> gpu_forecast.Comparison:
    """Every way to use `job.gpus` of its GPU for `model`.

    Raises:
        ConfigError: something cannot be planned.
    """
    assert job.gpus is not None
    ring = _ring(job, *_settled(model, job))
    if ring is None:
        raise _error("gpus", f"is {job.gpus}; of which kind is said by --gpu, one of {', '.join(gpu_forecast.gpus())}")
    return gpu_forecast.compare(ring, job.gpus, job.chunks)


def _settled(model: ModelConfig, job: PlanJob) -> tuple[ModelSizes, Workload, Storage]:
    """Model sizes, workload and storage to plan for, checked as far as possible without a split. Raises ConfigError."""
    _check(job)
    sizes = sizes_with_window(model)
    steps = choose_steps(model.step_count, sizes.spec.steps, sizes.spec.name)
    quantize = "none" if model.quantize == "auto" else model.quantize  # which only a trial on the device tells
    storage = Storage(DTYPES[job.dtype or ("bfloat16" if job.gpu else "float32")], quantize, model.offload)
    stages = job.stages or (1 if job.gpu else 4)
    return sizes, Workload(stages, job.sessions, steps, model.kv_context, job.max_rows), storage


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _error(name: str, problem: str) -> ConfigError:
    return ConfigError(f"{_flag(name)} {problem}", field=name)


def _check(job: PlanJob) -> None:
    """Check what can be checked without reading files. Raises ConfigError."""
    for names, others, why in _APART:
        for name in job.given(*names):
            for other in job.given(*others):
                raise _error(name, f"does not go with {_flag(other)}: {why}; leave one of them out")
    for name in job.given("link", "fps"):
        if job.gpu is None:
            raise _error(name, f"is {getattr(job, name)}, which is said of GPUs that are named with --gpu")
    for name in job.given("trace", "plot"):
        path = getattr(job, name)
        is_special = path.exists() and not path.is_file() and not path.is_dir()  # /dev/stdout
        if path.is_dir() or not (is_special or os.access(path.resolve().parent, os.W_OK)):
            raise _error(name, f"is {str(path)!r}; give a file's name in a folder that can be written to")
    if job.plot is not None:
        simulator.check_plot(job.plot)
        if job.trace is not None and job.trace.resolve() == job.plot.resolve():
            raise _error("trace", f"and --plot are both {str(job.plot)!r}; give each a file of its own")


def _ring(job: PlanJob, sizes: ModelSizes, load: Workload, storage: Storage) -> gpu_forecast.GpuRing | None:
    """The named GPUs; None where none are."""
    if job.gpu is None:
        return None
    gpu = gpu_forecast.find(job.gpu)
    return gpu_forecast.GpuRing(gpu, gpu.pick_link(job.link), sizes, storage, load, job.decode_rank)


def _costs(job: PlanJob, sizes: ModelSizes, load: Workload, storage: Storage) -> Costs:
    if job.profile is not None:
        return read_profile(job.profile, sizes, max_rows=load.max_rows)
    given = {name: getattr(job, name) for name in job.given(*_CEILINGS)}
    return estimate(
        sizes, Ceilings(**given), kv_context=load.kv_context, max_rows=load.max_rows, value_bytes=storage.value_bytes
    )


def _by_hand(job: PlanJob, sizes: ModelSizes, load: Workload) -> Layout:
    """The layout where stage times are typed; blocks are then spread evenly."""
    times = job.stage_times or ()
    if len(times) != load.stages or not all(0 < time_s < math.inf for time_s in times):
        raise _error("stage_times", f"must be {load.stages} times in seconds, each above 0 (--stages is {load.stages})")
    blocks, links = partition.split_evenly(sizes.blocks, load.stages), (job.link_time or 0.0,) * load.stages
    stage_s = tuple(in_proportion(time_s, load.max_rows) for time_s in times)
    places = partition.places(job.decode_rank)
    return partition.fastest((Layout(blocks, stage_s, links, each, job.decode_time or 0.0) for each in places), load)


def _forecast(ring: gpu_forecast.GpuRing, model: ModelConfig, layout: Layout, target_fps: float) -> Forecast:
    """What to expect of the GPUs, and why one session does not fit on one of the ranks."""
    entry = catalogue.lookup(model.name)
    demand = Demand(
        ring.sizes,
        ring.storage,
        layout.blocks,
        ring.decode if ring.decode in ("last", "dedicated") else "head",
        replace(ring.load, sessions=1),
        entry.autoencoder if entry is not None else "",
        model.vae,
        changeable=entry is not None and entry.weights is not None,
    )
    found = (memory.misfit(demand, row.rank, ring.gpu.usable_bytes, ring.gpu.title) for row in demand.memory())
    quality = dict.fromkeys(KV_CONTEXTS, "not known")
    if model.name in catalogue.entries() and entry is not None and entry.context is not None:
        quality |= dict.fromkeys(entry.context.works, "known to work")
        quality |= {entry.context.trained: "trained for it"} if entry.context.trained else {}
    return Forecast(
        ring,
        target_fps,
        gpu_forecast.forecast(ring, target_fps),
        {each: replace(ring, load=replace(ring.load, kv_context=each)).most_sessions() for each in KV_CONTEXTS},
        {each: quality[each] for each in KV_CONTEXTS},
        next((text for text in found if text is not None), None),
    )


# ---- what is printed -------------------------------------------------------------------------------------------


def as_tree(found: Plan | gpu_forecast.Comparison) -> dict[str, object]:
    """As JSON: seconds, bytes, shares of time."""
    return _plan_tree(found) if isinstance(found, Plan) else _comparison_tree(found)


def as_text(found: Plan | gpu_forecast.Comparison) -> Iterator[str]:
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
    decode = _time(layout.decode_s) if layout.decode_s > 0 else "not known, counted as 0 (--decode-time says it)"
    rows = [_rank_row(plan, row) for row in plan.memory]
    titles = (name.replace("_", " ") for name in plan.memory[0].parts)
    yield from (
        f"{spec.name}: {counted(load.stages, 'stage')}, {counted(load.sessions, 'session')}, KV context "
        f"{load.kv_context}, {counted(load.steps, 'step')}, up to {counted(load.max_rows, 'row')} per forward",
        f"times: {plan.source}",
        "",
        *aligned([("rank", "blocks", "time", "busy", *titles, "total", ""), *rows]),
        "",
        f"decode: {decode} per chunk, {_PLACES[layout.decode]}",
        "",
        f"simulated, {counted(plan.setup.chunks, 'chunk')} per session, steady state; a whole forward takes "
        f"{_time(whole_s)}",
        f"  throughput   {figures.chunks_per_s:.4g} chunks/s = {figures.chunks_per_s * spec.chunk_frames:.4g} "
        f"frames/s, all sessions together ({figures.chunks_per_s * whole_s:.2f} chunks per whole forward)",
        f"  latency      {_time(figures.latency_s)} from admission to decoded, longest "
        f"{_time(figures.longest_latency_s)} ({figures.latency_s / whole_s:.2f} whole forwards)",
        f"  first chunk  after {_time(figures.first_chunk_s)}, the second after {_time(figures.second_chunk_s)}",
        f"  gaps         {_time(worst.mean_s)} between a session's finished chunks, longest {_time(worst.longest_s)} "
        f"({worst.longest_s / worst.mean_s:.2f} times the mean)",
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
        "published_figures_within_factor": gpu_forecast.FACTOR,
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
    yield f"docs/plan.md, lie within a factor of {gpu_forecast.FACTOR:g}); the target is {target}"
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
    if (words := gpu_forecast.offload_words(ring.sizes, ring.storage, ring.load, gpu)) is not None:
        yield f"  {words}"
    if found.misfit is not None:
        yield f"  {found.misfit}"
    yield f"  rates: {gpu.source}"
    yield f"  shares of them: {gpu.shares_from}"


def _case(each: gpu_forecast.Expected) -> str:
    of_each, misfit = ", each" if each.sessions > 1 else "", "" if each.fits else ", does not fit"
    return f"{each.frames_per_s:.3g} frames/s{of_each}, first after {each.first_chunk_s:.2g} s{misfit}"


# ---- a comparison ----------------------------------------------------------------------------------------------


def _comparison_tree(found: gpu_forecast.Comparison) -> dict[str, object]:
    ring = found.one_gpu.ring
    best = {kind: found.best(kind) for kind in found.one_gpu.expected}
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


def _case_tree(case: gpu_forecast.Case, found: gpu_forecast.Comparison) -> dict[str, object]:
    return {
        "parallel": case.parallel,
        "decode": case.decode,
        "forward_s": case.forward_s,
        "times_one_gpu": found.one_gpu.forward_s / case.forward_s,
        "one_session": asdict(case.expected["one"]),
        "sessions": asdict(case.expected["sessions"]),
        "as_many_as_fit": asdict(case.expected["many"]),
        "sessions_that_fit": case.sessions_that_fit,
        "rank_bytes": case.rank_bytes,
    }


def _comparison_text(found: gpu_forecast.Comparison) -> Iterator[str]:
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
        yield f"best for {counted(count, 'session')}: {best_words(found, 'one' if count == 1 else 'sessions')}"
    if found.best("many") is not None:
        yield f"best for as many as fit: {best_words(found, 'many')}"
    yield f"rates: {ring.gpu.source}"


def _case_row(case: gpu_forecast.Case, found: gpu_forecast.Comparison, counts: list[int]) -> tuple[str, ...]:
    low, high = (f"{size(case.rank_bytes) / 1e9:.3g}" for size in (min, max))
    forward = f"{1e3 * case.forward_s:.3g} ms, {found.one_gpu.forward_s / case.forward_s:.2f}x"
    columns = (
        f"{each.frames_per_s:.3g}, {each.latency_s:.2g} s, {each.first_chunk_s:.2g} s"
        + ("" if each.fits else ", does not fit")
        for each in (case.expected["one" if count == 1 else "sessions"] for count in counts)
    )
    memory = f"{high} GB" if low == high else f"{low} to {high} GB"
    return case.parallel, case.decode, forward, *columns, memory, str(case.sessions_that_fit)


def best_words(found: gpu_forecast.Comparison, kind: gpu_forecast.Kind) -> str:
    """The best case of this kind of sessions, for one line."""
    case = found.best(kind)
    if case is None:
        return f"none fits; streamdiff plan --gpu {found.one_gpu.ring.gpu.name} says what would"
    expected = case.expected[kind]
    where = _DECODING.get(case.decode, "decoding on the first rank")
    together = "" if expected.sessions == 1 else f" of {expected.sessions} sessions together"
    idle = ""
    if len(case.rank_bytes) < found.count:  # by one, see `forecast.compare`
        ways = ", ".join(str(each) for each in partition.possible_shares(case.ring.sizes) if each <= found.count)
        idle = f"; the last GPU stays idle: no way to use all {found.count} is faster ({ways} can share a stage)"
    return f"{case.parallel}, {where}: {expected.together:.3g} frames/s{together}{idle}"


# ---- serve --gpus ----------------------------------------------------------------------------------------------

_NAMES = """
import json, torch
print(json.dumps([torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]))
"""


def devices_here() -> list[str]:
    """Names of the CUDA devices that torch sees, asked in a process of its own: the server's never loads torch.

    Raises:
        EngineFailure: torch does not answer.
    """
    probe = subprocess.run([sys.executable, "-c", _NAMES], env=environment(), capture_output=True, text=True)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        raise EngineFailure(f"torch does not say which CUDA devices are here: {last}")
    names: list[str] = json.loads(probe.stdout)
    return names


def with_best(config: Config, wanted: ServeJob, here: Callable[[], Sequence[str]] = devices_here) -> Config:
    """`config` with the stages, shares and, where that was left open, place of decoding that are best on so many of the
    devices `here`, for one stream, or with the goal `many` for as many as fit. Says which, and why, on standard error.

    Raises:
        ConfigError: something else decides already, the devices are not there, or the model does not fit on them.
        EngineFailure: as `devices_here`.
    """
    model, count = config.model, wanted.gpus
    if count is None:
        raise ConfigError(f"--for {wanted.goal} says what --gpus N is used for; give --gpus too", field="goal")
    for name in sorted({"parallel", "stages"} & model.model_fields_set):
        raise ConfigError(
            f"--gpus {count} chooses stages and the ranks that share them, and {name} is given "
            f"({getattr(model, name)}, by --{name} or model.{name} in the file); leave one of them out",
            field=f"model.{name}",
        )
    if model.device == "cpu":
        raise ConfigError(
            f"--gpus is {count}, and device is cpu; --stages or --parallel split a model over processes on a CPU",
            field="model.device",
        )
    gpu, has_place = _kind(count, list(here())), "decode_rank" in model.model_fields_set
    job = PlanJob(
        gpu=gpu.name,
        gpus=count,
        max_rows=config.batching.max_rows,
        decode_rank=model.decode_rank if has_place else "auto",
        dtype=None if model.dtype == "auto" else model.dtype,
    )
    found, kind = compare(model, job), wanted.goal or "one"
    if (best := found.best(kind)) is None:
        raise ConfigError(
            f"{model.name} does not fit on {found.machine}, however they are used; streamdiff plan --gpu {gpu.name} "
            f"--model {model.name} says which options make it fit",
            field="gpus",
            code="memory",
        )
    decode = "" if has_place else f" --decode-rank {best.decode}"
    why = f"{best_words(found, kind)}; of {len(found.cases)} ways to use {found.machine}, estimated"
    print(f"streamdiff: --parallel {best.parallel}{decode}: {why}", file=sys.stderr)
    chosen = {**model.model_dump(exclude_unset=True), "parallel": best.parallel, "decode_rank": best.decode}
    return config.model_copy(update={"model": ModelConfig.model_validate(chosen)})


def _kind(count: int, titles: Sequence[str]) -> gpu_forecast.Gpu:
    """The GPU that the first `count` devices are. Raises ConfigError: they are not there, not alike, or not known."""
    kinds = sorted(set(titles[:count]))
    if len(titles) < count:
        why = f"torch sees {len(titles)} CUDA devices here ({', '.join(titles) or 'none'}). Give fewer, or --stages or "
        why += f"--parallel; streamdiff plan --gpus {count} --gpu h100 says what GPUs that are not here would do"
    elif len(kinds) == 1 and (gpu := gpu_forecast.recognise(kinds[0])) is not None:
        return gpu
    else:
        known = ", ".join(gpu_forecast.gpus())
        why = f"the devices are {', '.join(kinds)}; what is best is computed for GPUs alike, of the kinds {known}. Say "
        why += "it yourself with --parallel PxC (docs/parallel.md)"
    raise ConfigError(f"--gpus is {count}, and {why}", field="gpus")
