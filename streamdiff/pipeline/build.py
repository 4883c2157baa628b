"""Builds the pipeline of a configuration: loads weights, joins the ranks, makes graphs and warms up with one chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep, in_flight_limit
from streamdiff.device import own_device
from streamdiff.errors import EngineFailure
from streamdiff.pipeline import load_plan, rank_process
from streamdiff.pipeline.loras import LoraFolder
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget, RankMemory
from streamdiff.pipeline.profiler import Profiler, check_folder
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.pipeline.worker_group import WorkerGroup
from streamdiff.session_state import walk

logger = logging.getLogger(__name__)

_MEASURED_CHUNKS = 3
ROUNDS = 5
"""Forwards that are timed; the shortest counts."""


def build_pipeline(config: ModelConfig) -> StreamingPipeline:
    """Load the model's weights, as the head of a ring if there are several stages, and warm up with one chunk.

    Raises:
        ConfigError: unknown model, a device that is not there, or a ring that cannot be built.
    """
    plan = load_plan.plan_load(config, own_device(config.device))
    started = rank_process.start_rank(plan, plan.join())
    plan, (model, parts) = started.plan, started.head
    config, device = plan.config, plan.device
    row_costs = _measure_rows(started) if plan.max_rows > 1 else []
    blocks = [last - first for first, last in plan.runs for _ in range(config.shares)]
    blocks += [0] * (config.ranks - config.stage_ranks)
    preallocated = plan.preallocated if device.type == "cuda" and config.shares == 1 else None  # shared: no pool
    itemsize, workers = model.denoiser.dtype.itemsize, None
    if started.watch.context is not None:
        workers = WorkerGroup(started.watch, config.watchdog_s, started.decode_links)
    pipeline = StreamingPipeline(
        model, device, config.step_count, config.kv_context, max_rows=plan.max_rows, parts=parts,
        workers=workers,
        budget=KVCacheBudget(plan.sizes, started.memories, blocks, itemsize, preallocated, config.shares),
        at_once=plan.decode_latents, watchdog_s=config.watchdog_s,
        pictures=plan.models.picture_encoder(model.spec),
    )  # fmt: skip
    pipeline.loras = LoraFolder(pipeline, config.lora_dir, config.max_loras, plan.runs)
    if row_costs:
        pipeline.scheduler.set_row_costs(row_costs)
        limit = pipeline.scheduler.row_limit
        shown, so = ", ".join(f"{cost:.3g}" for cost in limit.costs), "" if limit.shares else "; so none share one"
        logger.info("batching: forwards of 1 to %d rows take %s times as long as of one%s", limit.max_rows, shown, so)
    try:
        _warm_up(pipeline, config)
    except EngineFailure as error:
        raise EngineFailure(f"in the start's phase warm-up: {error}") from error
    pipeline.figures.occupancy()  # counts from here
    return pipeline


def _measure_rows(started: rank_process.StartedRank) -> list[float]:
    """What forwards of 1, 2, ... rows take here."""
    plan, (model, parts) = started.plan, started.head
    stage = parts.stage
    if stage.group is not None:  # a forward would wait for the others: what is measured is all of the stage
        stage = ModelRunner(model, stage.device, 1, 3)
    context, memory = plan.config.kv_context, started.loaded.memory
    return row_costs(stage, plan.max_rows, steps=plan.steps, kv_context=context, memory=memory)


def row_costs(stage: ModelRunner, max_rows: int, *, steps: int, kv_context: str, memory: RankMemory) -> list[float]:
    """Seconds of forwards of 1 to `max_rows` rows on this stage, of sessions with full windows. Measured are powers of
    two and the last, as far as `memory` has room for so many sessions; others lie on a line with their neighbours.
    Mutates: the stage's caches, of sessions that are closed again.
    """
    spec, rows = stage.spec, list[MicroStep]()
    most = max_rows
    while len(rows) < most:
        session = -1 - len(rows)
        stage.open(session, steps=steps, kv_context=kv_context)
        stage.set_text(session, 0, torch.zeros(spec.text_shape), 0)
        rows.append(MicroStep(session, spec.window_chunks(kv_context) + spec.first_chunks, 0, steps, 0))
        most = max(1, memory.holds(max_rows, walk.nbytes(stage.sessions[session].state)))
    counts = sorted({*(2**power for power in range(most.bit_length())), most})
    given = {count: stage.zeros(count) for count in counts}
    timed: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(1 + ROUNDS):  # in turns, so that what else the machine does falls on all
        for count in counts:
            timed[count].append(_run_s(partial(stage.forward, rows[:count], given[count]), stage.device))
    for row in rows:
        stage.close(row.session)
    # Other work only adds time, so the shortest is the nearest; of the first round nothing counts.
    return interpolate_costs({count: min(spent[1:]) for count, spent in timed.items()}, max_rows)


def interpolate_costs(seconds: Mapping[int, float], most: int) -> list[float]:
    """Interpolate `seconds` by number of rows (1 is among them), to 1 to `most` rows: linearly, beyond the last
    along the last two (if there is one only, in proportion), never decreasing."""
    counts = sorted(seconds)
    values: list[float] = []
    for count in range(1, most + 1):
        above = next((each for each in counts if each >= count), counts[-1])
        below = max((each for each in counts if each < above), default=0)
        slope = (seconds[above] - seconds.get(below, 0.0)) / (above - below)
        values.append(max([seconds[above] + slope * (count - above), *values[-1:]]))
    return values


@torch.inference_mode()
def _run_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run."""
    begun_s = clock.monotonic_s()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock.monotonic_s() - begun_s


def _warm_up(pipeline: StreamingPipeline, config: ModelConfig) -> None:
    """Make one chunk, so that the first viewer does not pay for first calls, and some more to see what they take.

    Graphs are made for the configured KV context and a full window, so with them that is what is measured; a staircase
    needs newcomers. So it is on CUDA, where attention's kernels are planned again for each length of a window that
    fills.
    """
    whole, spec = config.compile == "on" or pipeline.stage.device.type == "cuda", pipeline.model.spec
    kv_context = config.kv_context if whole else "clean"
    before = max(spec.window_chunks(kv_context), spec.first_chunks) if whole else 1
    steps = pipeline.info.steps
    in_flight = in_flight_limit(kv_context, steps=steps, stages=config.stages)
    conditioning = pipeline.text.encode(pipeline.text.read(pipeline.text.examples[0], None).text)
    pipeline.open(0, conditioning, seed=0, epoch=0, steps=steps, kv_context=kv_context)
    for number in range(before + _MEASURED_CHUNKS):
        if number == before:
            pipeline.figures.measure_from_here()
        left = spec.first_chunks if number == 0 else 1
        pipeline.set_frame_credit(0, max(in_flight, left) * pipeline.info.chunk_frames)
        while left > 0:
            left -= sum(frames.last for frames in pipeline.step(wait_s=1.0))
    pipeline.figures.measure_to_here()
    pipeline.close_session(0)
    while pipeline.has_work:  # newcomers of a staircase are still in it
        pipeline.step(wait_s=1.0)


def load_pipeline(config: ModelConfig) -> StreamingPipeline:
    """`build_pipeline`, with a `Profiler` if the configuration asks for a trace.

    Raises:
        ConfigError: as `build_pipeline` and `check_folder`.
    """
    if config.trace is None:
        return build_pipeline(config)
    folder = Path(config.trace)
    check_folder(folder)
    pipeline = build_pipeline(config)
    Profiler(pipeline, folder)
    return pipeline
