"""What `streamdiff plan` does: checks, plans, simulates, prints. Knows nothing about the command line itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from streamdiff.atomic_write import check_parent, exit_on_sigterm
from streamdiff.commands import plan_forecast, plan_parallel
from streamdiff.commands.models import aligned, counted
from streamdiff.commands.plan_forecast import GpuForecast
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.spec import choose_steps
from streamdiff.pipeline.planner import costs as cost
from streamdiff.pipeline.planner import gpus, parallel, trace
from streamdiff.pipeline.planner.forecast import costs_on, link_times, ring_setup
from streamdiff.pipeline.planner.memory import Memory, Storage, memory
from streamdiff.pipeline.planner.model_sizes import ModelSizes, sizes_of
from streamdiff.pipeline.planner.parallel import Comparison
from streamdiff.pipeline.planner.partition import check_stages, split_evenly
from streamdiff.pipeline.planner.simulator import Run, Setup, simulate
from streamdiff.pipeline.planner.stage_layout import PLACES, Layout, Workload, choose_layout, fastest, layout_of

DTYPES = {"float32": 4, "bfloat16": 2}
CHUNKS = 100


@dataclass(frozen=True)
class PlanJob:
    """Options of `streamdiff plan`. Stage times come from `stage_times` (seconds, comma-separated), else `profile`,
    else an estimate at the ceilings, those of `gpu` (`planner.gpus`) if it is named, linked by `link`; `link_time` and
    `decode_time` (seconds) win over either. `stages` and `dtype` are 4 and float32, with a GPU 1 and bfloat16, unless
    they are given; `fps` is the rate that a forecast for a GPU is held against. With `gpus` every way to use so many is
    compared (`planner.parallel`). `chunks` are simulated per session: 100, or fewer where many cases are."""

    stages: int | None = None
    sessions: int = 1
    max_rows: int = 1
    chunks: int | None = None
    stage_times: str | None = None
    profile: Path | None = None
    gpu: str | None = None
    gpus: int | None = None
    link: str | None = None
    fps: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    link_gbps: float | None = None
    link_time: float | None = None
    decode_time: float | None = None
    decode: str = "auto"
    dtype: str | None = None
    trace: Path | None = None
    plot: Path | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Outcome:
    """A plan and its results: layout, memory per rank, simulated run and, with a GPU, a forecast."""

    source: str
    sizes: ModelSizes
    load: Workload
    layout: Layout
    setup: Setup
    memory: tuple[Memory, ...]
    run: Run
    gpu: GpuForecast | None = None


def _as_asked(sizes: ModelSizes, model: ModelConfig) -> ModelSizes:
    """`sizes` with the window and sink of the configuration. Raises ConfigError for a window that is too small."""
    spec = sizes.spec
    if model.window is not None:
        spec = replace(spec, window_latents=model.window, clean_window_latents=None)
    if model.sink is not None:
        spec = replace(spec, sink_latents=model.sink)
    sizes = replace(sizes, spec=spec)
    least = sizes.spec.sink_latents + sizes.spec.chunk_latents
    window = sizes.spec.window(model.kv_context)
    if (model.window, model.sink) != (None, None) and window < least:
        raise ConfigError(f"--window is {window} latent frames; it holds the sink and a chunk, so at least {least}")
    return sizes


def run(model: ModelConfig, job: PlanJob) -> int:
    """Plan, print the plan, and write the trace and plot where the job has them; returns the exit status.

    Raises:
        ConfigError: something cannot be planned; nothing is computed or written then.
    """
    if job.gpus is not None:
        found, sizes, load = compare(model, job)
        tree, lines = plan_parallel.as_tree(found, sizes, load), plan_parallel.as_text(found, sizes, load)
        print(json.dumps(tree, indent=2) if job.as_json else "\n".join(lines))
        return 0
    outcome = make(model, job)
    with exit_on_sigterm():
        if job.trace is not None:
            trace.write_trace(job.trace, outcome.run.spans, outcome.load.stages)
        if job.plot is not None:
            trace.write_plot(job.plot, outcome.run.spans, outcome.load.stages)
    print(json.dumps(as_tree(outcome), indent=2) if job.as_json else "\n".join(as_text(outcome)))
    return 0


def make(model: ModelConfig, job: PlanJob) -> Outcome:
    """The plan for `model` (its name, steps, KV context, window, sink and way to quantise count).

    Raises:
        ConfigError: something cannot be planned.
    """
    job = replace(job, stages=job.stages if job.stages is not None else (1 if job.gpu else 4))
    sizes, load, storage = _settled(model, job)
    stages = load.stages
    check_stages(stages, sizes.blocks)
    if job.stage_times is not None:
        source, layout, decode_s, links = _by_hand(job.stage_times, job, sizes, load)
    else:
        found = _costs(job, sizes, load, storage)
        source, layout = found.source, choose_layout(found, load, job.decode)
        decode_s = found.decode_s
        links = link_times(found, stages)
    setup = ring_setup(sizes, load, layout, links, decode_s, job.chunks or CHUNKS)
    forecast = None
    if job.gpu is not None:
        gpu = gpus.find(job.gpu)
        forecast = plan_forecast.ask(
            gpu, model, sizes, load, storage, decode=job.decode, blocks=layout.blocks, fps=job.fps, link=job.link
        )
    return Outcome(source, sizes, load, layout, setup, memory(sizes, layout, load, storage), simulate(setup), forecast)


def compare(model: ModelConfig, job: PlanJob) -> tuple[Comparison, ModelSizes, Workload]:
    """Every way to use `job.gpus` of its GPU for `model`.

    Raises:
        ConfigError: something cannot be planned.
    """
    if job.gpu is None or job.gpus is None:
        raise ConfigError(f"--gpus is {job.gpus}; of which kind is said by --gpu, one of {', '.join(gpus.GPUS)}")
    if not 1 <= job.gpus <= parallel.GPUS_AT_MOST:
        raise ConfigError(f"--gpus is {job.gpus}, but must be 1 to {parallel.GPUS_AT_MOST}")
    for name in ("stages", "stage_times", "profile", "link_time", "decode_time", "trace", "plot", "fps"):
        if getattr(job, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} does not go with --gpus, which compares several rings; leave one of them out")
    sizes, load, storage = _settled(model, replace(job, stages=1))
    gpu = gpus.find(job.gpu)
    machine = parallel.Machine(gpu, job.gpus, gpu.pick_link(job.link))
    return parallel.compare(machine, sizes, load, storage, job.decode, job.chunks), sizes, load


def _settled(model: ModelConfig, job: PlanJob) -> tuple[ModelSizes, Workload, Storage]:
    """Model sizes, workload and storage to plan for, checked as far as possible without a split. Raises ConfigError."""
    assert job.stages is not None
    dtype = job.dtype or ("bfloat16" if job.gpu else "float32")
    _check(replace(job, dtype=dtype))
    sizes = _as_asked(sizes_of(model), model)
    steps = choose_steps(model.step_count, sizes.spec.steps, sizes.spec.name)
    load = Workload(job.stages, job.sessions, steps, model.kv_context, job.max_rows)
    quantize = "none" if model.quantize == "auto" else model.quantize  # which only a trial on the device tells
    storage = Storage(DTYPES[dtype], quantize, model.offload)
    return sizes, load, storage


def _check(job: PlanJob) -> None:
    """Check what can be checked without reading files. Raises ConfigError."""
    for name, value in (("--stages", job.stages), ("--sessions", job.sessions), ("--max-rows", job.max_rows)):
        if value is not None and not 1 <= value <= 1024:
            raise ConfigError(f"{name} is {value}, but must be 1 to 1,024")
    if job.chunks is not None and not 8 <= job.chunks <= 10_000:
        raise ConfigError(f"--chunks is {job.chunks}, but must be 8 to 10,000")
    for name, time_s in (("--link-time", job.link_time), ("--decode-time", job.decode_time)):
        if time_s is not None and not 0 <= time_s < math.inf:
            raise ConfigError(f"{name} is {time_s:g}, but must be seconds of 0 or more")
    places = ("auto", *PLACES)
    if job.decode not in places:
        raise ConfigError(f"--decode-rank is {job.decode!r}, but must be one of {', '.join(places)}")
    if job.dtype not in DTYPES:
        raise ConfigError(f"--dtype is {job.dtype!r}, but must be one of {', '.join(DTYPES)}")
    if job.stage_times is not None and job.profile is not None:
        raise ConfigError("--stage-times and --profile are both given; times can come from one of them only")
    if job.stage_times is not None or job.profile is not None:
        for name, ceiling in (*_ceilings(job), ("--gpu", job.gpu)):
            if ceiling is not None:
                raise ConfigError(f"{name} is for the estimate; leave it out where times are given")
    if job.gpu is not None:
        gpus.find(job.gpu)
        if given := [name for name, ceiling in _ceilings(job) if ceiling is not None]:
            raise ConfigError(f"--gpu {job.gpu} says what {' and '.join(given)} would say; give one or the other")
    if job.link is not None and job.gpu is None:
        raise ConfigError(f"--link is {job.link!r}: it is what GPUs named with --gpu are linked by")
    if job.fps is not None and not (0 < job.fps < math.inf and job.gpu is not None):
        raise ConfigError(f"--fps is {job.fps:g}; it is the rate, above 0, that a --gpu is held against")
    for name, path in (("--trace", job.trace), ("--plot", job.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problem = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
            raise ConfigError(f"{name} is {str(path)!r}, which {problem}; give a file's name in a folder that exists")
        if path is not None and (path.is_file() or not path.exists()):  # not /dev/stdout, which is written to as it is
            check_parent(path.resolve())
    if job.plot is not None:
        trace.check_plot(job.plot)
        if job.trace is not None and job.trace.resolve() == job.plot.resolve():
            raise ConfigError(f"--trace and --plot are both {str(job.plot)!r}; give each a file of its own")


def _ceilings(job: PlanJob) -> tuple[tuple[str, float | None], ...]:
    return ("--tflops", job.tflops), ("--gbps", job.gbps), ("--link-gbps", job.link_gbps)


def _costs(job: PlanJob, sizes: ModelSizes, load: Workload, storage: Storage) -> cost.Costs:
    if job.gpu is not None:
        found = costs_on(gpus.find(job.gpu), sizes, load, storage, job.link)
    elif job.profile is not None:
        found = cost.read_profile(job.profile, sizes, max_rows=load.max_rows)
    else:
        given: dict[str, Any] = {"tflops": job.tflops, "gbps": job.gbps, "link_gbps": job.link_gbps}
        ceilings = cost.Ceilings(**{name: value for name, value in given.items() if value is not None})
        found = cost.estimate(
            sizes, ceilings, kv_context=load.kv_context, max_rows=load.max_rows, value_bytes=storage.value_bytes
        )
    if job.decode_time is not None:
        found = replace(found, decode_s=job.decode_time)
    return found if job.link_time is None else replace(found, link_s=job.link_time, flow_s=job.link_time)


def _by_hand(
    text: str, job: PlanJob, sizes: ModelSizes, load: Workload
) -> tuple[str, Layout, float, tuple[float, ...]]:
    """Source, layout, decode time and link times where stage times are typed; blocks are then spread evenly."""
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        times = []
    if len(times) != load.stages or not all(0 < time_s < math.inf for time_s in times):
        raise ConfigError(
            f"--stage-times is {text!r}, but must be {load.stages} times in seconds, each above 0, separated by commas "
            f"(--stages is {load.stages})"
        )
    decode_s, blocks = job.decode_time or 0.0, split_evenly(sizes.blocks, load.stages)
    stage_s = [cost.in_proportion(time_s, load.max_rows) for time_s in times]
    layout = fastest(job.decode, lambda place: layout_of(blocks, stage_s, place, load, decode_s))
    return "stage times given by hand; blocks spread evenly", layout, decode_s, (job.link_time or 0.0,) * load.stages


# ---- what is printed -------------------------------------------------------------------------------------------


def as_tree(outcome: Outcome) -> dict[str, object]:
    """The plan as JSON: seconds, bytes, shares of time."""
    sizes, load, layout, figures = outcome.sizes, outcome.load, outcome.layout, outcome.run.figures
    busy = [*figures.occupancy, figures.decode_occupancy]
    ranks: list[dict[str, object]] = []
    for row in outcome.memory:
        stage = row.rank < load.stages
        ranks.append(
            {
                "rank": row.rank,
                "role": row.role.split(),
                "blocks": list(layout.blocks[row.rank]) if stage else [],
                "forward_s": list(layout.stage_s[row.rank]) if stage else [],
                "occupancy": busy[row.rank],
                "bytes": {**row.parts, "total": row.total},
            }
        )
    return {
        "model": sizes.spec.name,
        "workload": asdict(load),
        "times": outcome.source,
        "ranks": ranks,
        "decode": {"place": layout.decode, "seconds": outcome.setup.decode_s},
        "link_s": list(outcome.setup.link_s),
        "figures": {
            **asdict(figures),
            "frames_per_s": figures.chunks_per_s * sizes.spec.chunk_frames,
            "whole_forward_s": _forward_s(layout),
        },
        **({"forecast": plan_forecast.as_tree(outcome.gpu)} if outcome.gpu is not None else {}),
    }


def as_text(outcome: Outcome) -> list[str]:
    """The plan for people."""
    sizes, load, layout, figures = outcome.sizes, outcome.load, outcome.layout, outcome.run.figures
    whole_s = _forward_s(layout)
    worst = max(figures.gaps, key=lambda gap: gap.longest_s / gap.mean_s)
    rate = figures.chunks_per_s * sizes.spec.chunk_frames
    lines = [
        f"{sizes.spec.name}: {counted(load.stages, 'stage')}, {counted(load.sessions, 'session')}, KV context "
        f"{load.kv_context}, {counted(load.steps, 'step')}, up to {counted(load.max_rows, 'row')} per forward",
        f"times: {outcome.source}",
        "",
        *_table(outcome),
        "",
        f"decode: {_decode_time(outcome)} per chunk, {_PLACE_TEXT[layout.decode]}",
        "",
        f"simulated, {counted(outcome.setup.chunks, 'chunk')} per session, steady state; a whole forward takes "
        f"{_time(whole_s)}",
        f"  throughput   {figures.chunks_per_s:.4g} chunks/s = {rate:.4g} frames/s, all sessions together "
        f"({figures.chunks_per_s * whole_s:.2f} chunks per whole forward)",
        f"  latency      {_time(figures.latency_s)} from admission to decoded, longest "
        f"{_time(figures.longest_latency_s)} ({figures.latency_s / whole_s:.2f} whole forwards)",
        f"  first chunk  after {_time(figures.first_chunk_s)}, the second after {_time(figures.second_chunk_s)}",
        f"  gaps         {_time(worst.mean_s)} between a session's finished chunks, longest {_time(worst.longest_s)} "
        f"({worst.longest_s / worst.mean_s:.2f} times the mean)",
    ]
    if load.max_rows > 1:
        lines.append(f"  rows         {figures.rows_per_forward:.2f} per forward")
    if outcome.gpu is not None:
        lines += ["", *plan_forecast.as_text(outcome.gpu)]
    return lines


_PLACE_TEXT = {
    "head": "on the head, rank 0",
    "last": "on the last rank",
    "dedicated": "on a rank of its own",
    "own-stream": "beside the head's stage on a stream of its own, taken to cost that stage nothing",
}


_MEMORY_COLUMNS = ("weights", "text", "caches", "activations", "decoding", "decode work")


def _decode_time(outcome: Outcome) -> str:
    unknown = "not known, counted as 0 (--decode-time says it)"
    return _time(outcome.setup.decode_s) if outcome.setup.decode_s > 0 else unknown


def _table(outcome: Outcome) -> list[str]:
    """One line per rank."""
    layout, figures = outcome.layout, outcome.run.figures
    rows: list[tuple[str, ...]] = [("rank", "blocks", "forward", "busy", *_MEMORY_COLUMNS, "total", "")]
    for row in outcome.memory:
        bytes_of = *map(_size, row.parts.values()), _size(row.total)
        if row.rank < len(layout.blocks):
            first, end = layout.blocks[row.rank]
            forward, busy = _time(layout.stage_s[row.rank][0]), figures.occupancy[row.rank]
            rows.append((str(row.rank), f"{first}-{end - 1}", forward, f"{busy:.0%}", *bytes_of, row.role))
        else:
            rows.append((str(row.rank), "none", "", f"{figures.decode_occupancy:.0%}", *bytes_of, row.role))
    return aligned(rows)


def _forward_s(layout: Layout) -> float:
    """Seconds of a forward of one row through all stages."""
    return math.fsum(times[0] for times in layout.stage_s)


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
