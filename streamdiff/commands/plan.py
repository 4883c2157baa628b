"""What `streamdiff plan` does: checks, plans, simulates; `plan_report` says it. Knows nothing about the command line
itself."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from streamdiff.atomic_write import check_parent, exit_on_sigterm
from streamdiff.commands import plan_report
from streamdiff.commands.plan_report import Forecast, Plan
from streamdiff.config import ModelConfig
from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.models.spec import choose_steps
from streamdiff.pipeline.planner import forecast, memory, partition, simulator
from streamdiff.pipeline.planner.costs import Ceilings, Costs, estimate, in_proportion, read_profile
from streamdiff.pipeline.planner.forecast import Comparison, GpuRing, ring_setup
from streamdiff.pipeline.planner.memory import Demand, Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes, sizes_with_window
from streamdiff.pipeline.planner.partition import PLACES, Layout, Workload

DTYPES = {name: size for size, name in forecast.DTYPES.items()}
CHUNKS = 100
_RANGES = {"stages": (1, 1024), "sessions": (1, 1024), "max_rows": (1, 1024), "chunks": (8, 10_000)}
_CEILINGS = ("tflops", "gbps", "link_gbps")
_OF_ONE_RING = ("stages", "stage_times", "profile", "link_time", "decode_time", "trace", "plot", "fps")


@dataclass(frozen=True)
class PlanJob:
    """Options of `streamdiff plan`. Stage times come from `stage_times` (seconds, comma-separated), else `profile`,
    else an estimate at the ceilings, those of `gpu` (`planner.forecast`) if it is named, linked by `link`; `link_time`
    and `decode_time` (seconds) win over either. `stages` and `dtype` are 4 and float32, with a GPU 1 and bfloat16,
    unless they are given; `fps` is the rate that a forecast for a GPU is held against. With `gpus` every way to use so
    many is compared. `chunks` are simulated per session: 100, or fewer where many cases are."""

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
    decode_rank: str = "auto"
    dtype: str | None = None
    trace: Path | None = None
    plot: Path | None = None
    as_json: bool = False

    def given(self, *names: str) -> list[str]:
        """Those of these options that are given."""
        return [name for name in names if getattr(self, name) is not None]


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
    tree, lines = plan_report.as_tree(found), plan_report.as_text(found)
    print(json.dumps(tree, indent=2) if job.as_json else "\n".join(lines))
    return 0


def make(model: ModelConfig, job: PlanJob) -> Plan:
    """The plan for `model` (its name, steps, KV context, window, sink and way to quantise count).

    Raises:
        ConfigError: something cannot be planned.
    """
    sizes, load, storage = _settled(model, job)
    partition.check_stages(load.stages, sizes.blocks)
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
    setup = ring_setup(sizes, load, layout, job.chunks or CHUNKS)
    ranks = Demand(sizes, storage, layout.blocks, layout.decode, load).memory()
    found = None if ring is None else _forecast(ring, model, layout, job.fps or sizes.spec.native_fps)
    return Plan(source, sizes, load, layout, setup, ranks, simulator.simulate(setup), found)


def compare(model: ModelConfig, job: PlanJob) -> Comparison:
    """Every way to use `job.gpus` of its GPU for `model`.

    Raises:
        ConfigError: something cannot be planned.
    """
    if job.gpu is None or job.gpus is None:
        raise _error("gpus", f"is {job.gpus}; of which kind is said by --gpu, one of {', '.join(forecast.gpus())}")
    if not 1 <= job.gpus <= forecast.GPUS_AT_MOST:
        raise _error("gpus", f"is {job.gpus}, but must be 1 to {forecast.GPUS_AT_MOST}")
    for name in job.given(*_OF_ONE_RING):
        raise _error(name, "does not go with --gpus, which compares several rings; leave one of them out")
    sizes, load, storage = _settled(model, job)
    ring = _ring(job, sizes, load, storage)
    assert ring is not None
    return forecast.compare(ring, job.gpus, job.chunks)


def _settled(model: ModelConfig, job: PlanJob) -> tuple[ModelSizes, Workload, Storage]:
    """Model sizes, workload and storage to plan for, checked as far as possible without a split. Raises ConfigError."""
    job = replace(
        job,
        stages=job.stages if job.stages is not None else (1 if job.gpu else 4),
        dtype=job.dtype or ("bfloat16" if job.gpu else "float32"),
    )
    _check(job)
    assert job.stages is not None and job.dtype is not None
    sizes = sizes_with_window(model)
    steps = choose_steps(model.step_count, sizes.spec.steps, sizes.spec.name)
    quantize = "none" if model.quantize == "auto" else model.quantize  # which only a trial on the device tells
    storage = Storage(DTYPES[job.dtype], quantize, model.offload)
    return sizes, Workload(job.stages, job.sessions, steps, model.kv_context, job.max_rows), storage


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _error(name: str, problem: str) -> ConfigError:
    return ConfigError(f"{_flag(name)} {problem}", field=name)


def _check(job: PlanJob) -> None:
    """Check what can be checked without reading files. Raises ConfigError."""
    for name in job.given(*_RANGES):
        low, high = _RANGES[name]
        if not low <= (count := getattr(job, name)) <= high:
            raise _error(name, f"is {count}, but must be {low} to {high:,}")
    for name in job.given("link_time", "decode_time"):
        if not 0 <= (time_s := getattr(job, name)) < math.inf:
            raise _error(name, f"is {time_s:g}, but must be seconds of 0 or more")
    for name, known in (("decode_rank", ("auto", *PLACES)), ("dtype", tuple(DTYPES))):
        if (word := getattr(job, name)) not in known:
            raise _error(name, f"is {word!r}, but must be one of {', '.join(known)}")
    if len(times := job.given("stage_times", "profile")) == 2:
        raise _error("stage_times", "and --profile are both given; times can come from one of them only")
    if times and (ceilings := job.given(*_CEILINGS, "gpu")):
        raise _error(ceilings[0], "is for the estimate; leave it out where times are given")
    if job.gpu is not None:
        forecast.find(job.gpu)
        if ceilings := job.given(*_CEILINGS):
            flags = " and ".join(map(_flag, ceilings))
            raise _error("gpu", f"{job.gpu} says what {flags} would say; give one or the other")
    for name in job.given(*_CEILINGS):
        if not 0 < (rate := getattr(job, name)) < math.inf:
            raise _error(name, f"is {rate:g}, but must be a number above 0")
    if job.link is not None and job.gpu is None:
        raise _error("link", f"is {job.link!r}: it is what GPUs named with --gpu are linked by")
    if job.fps is not None and not (0 < job.fps < math.inf and job.gpu is not None):
        raise _error("fps", f"is {job.fps:g}; it is the rate, above 0, that a --gpu is held against")
    _check_files(job)


def _check_files(job: PlanJob) -> None:
    for name, path in (("trace", job.trace), ("plot", job.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problem = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
            raise _error(name, f"is {str(path)!r}, which {problem}; give a file's name in a folder that exists")
        if path is not None and (path.is_file() or not path.exists()):  # not /dev/stdout, which is written to as it is
            check_parent(path.resolve())
    if job.plot is not None:
        simulator.check_plot(job.plot)
        if job.trace is not None and job.trace.resolve() == job.plot.resolve():
            raise _error("trace", f"and --plot are both {str(job.plot)!r}; give each a file of its own")


def _ring(job: PlanJob, sizes: ModelSizes, load: Workload, storage: Storage) -> GpuRing | None:
    """The named GPUs; None where none are."""
    if job.gpu is None:
        return None
    gpu = forecast.find(job.gpu)
    return GpuRing(gpu, gpu.pick_link(job.link), sizes, storage, load, job.decode_rank)


def _costs(job: PlanJob, sizes: ModelSizes, load: Workload, storage: Storage) -> Costs:
    if job.profile is not None:
        return read_profile(job.profile, sizes, max_rows=load.max_rows)
    given = {name: getattr(job, name) for name in job.given(*_CEILINGS)}
    return estimate(
        sizes, Ceilings(**given), kv_context=load.kv_context, max_rows=load.max_rows, value_bytes=storage.value_bytes
    )


def _by_hand(job: PlanJob, sizes: ModelSizes, load: Workload) -> Layout:
    """The layout where stage times are typed; blocks are then spread evenly."""
    assert job.stage_times is not None
    try:
        times = [float(word) for word in job.stage_times.split(",")]
    except ValueError:
        times = []
    if len(times) != load.stages or not all(0 < time_s < math.inf for time_s in times):
        raise _error(
            "stage_times",
            f"is {job.stage_times!r}, but must be {load.stages} times in seconds, each above 0, separated by commas "
            f"(--stages is {load.stages})",
        )
    blocks, links = partition.split_evenly(sizes.blocks, load.stages), (job.link_time or 0.0,) * load.stages
    stage_s = tuple(in_proportion(time_s, load.max_rows) for time_s in times)
    decode_s = job.decode_time or 0.0
    return partition.fastest(
        (Layout(blocks, stage_s, links, place, decode_s) for place in partition.places(job.decode_rank)), load
    )


def _forecast(ring: GpuRing, model: ModelConfig, layout: Layout, target_fps: float) -> Forecast:
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
    rings = {each: replace(ring, load=replace(ring.load, kv_context=each)) for each in KV_CONTEXTS}
    return Forecast(
        ring,
        target_fps,
        forecast.forecast(ring, target_fps),
        {kv_context: each.most_sessions() for kv_context, each in rings.items()},
        _quality(model.name),
        next((text for text in found if text is not None), None),
    )


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
