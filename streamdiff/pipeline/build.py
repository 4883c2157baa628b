"""Builds the pipeline of a configuration: loads weights, joins the ranks, makes graphs and warms up with one chunk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from streamdiff.config import ModelConfig
from streamdiff.core import in_flight_limit
from streamdiff.device import own_device
from streamdiff.errors import EngineFailure
from streamdiff.models.model import Model
from streamdiff.pipeline import balance, load_plan, rank_loader, topology
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS
from streamdiff.pipeline.distributed.rendezvous import StartProgress
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget, RankMemory
from streamdiff.pipeline.profiler import Profiler, check_folder
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.pipeline.worker_group import WorkerGroup
from streamdiff.pipeline.worker_main import start_progress

logger = logging.getLogger(__name__)

_MEASURED_CHUNKS = 3


class RingHead(NamedTuple):
    """Rank 0, loaded, and connected to the `workers` if there are any; `memories` are those of all ranks."""

    plan: load_plan.RankPlan
    loaded: rank_loader.LoadedRank
    ring: RingExecutor
    workers: WorkerGroup | None
    memories: list[RankMemory]

    @property
    def model(self) -> Model:
        """Its part of the model."""
        assert isinstance(self.loaded.model, Model), "this is rank 0"
        return self.loaded.model


def load_head(plan: load_plan.LoadPlan) -> RingHead:
    """Load what rank 0 runs, connect it to the other ranks if there are some, and make graphs.

    Raises:
        ConfigError: parts that are missing, or a ring that cannot be built.
    """
    config, device, context, links = plan.config, plan.device, plan.join(), None
    progress = StartProgress(None, 1) if context is None else start_progress(context, config)
    rank_plan = load_plan.plan_rank(plan, context)
    loaded = rank_loader.load_rank(rank_plan, context)
    model, memory = loaded.model, loaded.memory
    assert isinstance(model, Model), "this is rank 0"
    if context is None:
        ring = RingExecutor(model, device, plan.max_rows)
    else:
        context.send_memory(memory)
        rank_topology = topology.StageTopology.of(config, 0, device, plan.max_rows)
        ring = topology.connect_head(model, rank_topology, device, progress.enter)
        progress.enter("graphs")
        if config.decode_rank_number != 0:
            links = topology.decode_links(model.spec, 0, config.decode_rank_number, device, plan.pixel_format)
    ring.stage.swaps = loaded.swaps
    rank_loader.compile_stage(rank_plan, ring.stage, memory, progress)
    rank_loader.compile_decoder(rank_plan, loaded.decoder, DECODE_THREADS)
    if context is None:
        return RingHead(rank_plan, loaded, ring, None, [memory])
    workers, memories = WorkerGroup(context, ring, config.watchdog_s, links), context.receive_memories()
    progress.finish()
    return RingHead(rank_plan, loaded, ring, workers, memories)


def build_pipeline(config: ModelConfig) -> StreamingPipeline:
    """Load the model's weights, as the head of a ring if there are several stages, and warm up with one chunk.

    Raises:
        ConfigError: unknown model, a device that is not there, or a ring that cannot be built.
    """
    head = load_head(load_plan.plan_load(config, own_device(config.device)))
    plan, ring, model = head.plan, head.ring, head.model
    config, device = plan.config, plan.device
    if plan.max_rows > 1:
        _measure_rows(ring, model, plan, head.loaded.memory)
    blocks = [last - first for first, last in head.loaded.runs for _ in range(config.shares)]
    blocks += [0] * (config.ranks - config.stage_ranks)
    preallocated = plan.preallocated if device.type == "cuda" and config.shares == 1 else None  # shared: no pool
    itemsize = model.denoiser.dtype.itemsize
    budget = KVCacheBudget(plan.sizes, head.memories, blocks, itemsize, preallocated, config.shares)
    pipeline = StreamingPipeline(
        model, device, config.step_count, config.kv_context, head.workers, budget, ring, plan.decode_latents,
        config.watchdog_s, plan.models.picture_encoder(model.spec),
    )  # fmt: skip
    try:
        _warm_up(pipeline, config)
    except EngineFailure as error:
        raise EngineFailure(f"in the start's phase warm-up: {error}") from error
    pipeline.figures.occupancy()  # counts from here
    return pipeline


def _measure_rows(ring: RingExecutor, model: Model, plan: load_plan.LoadPlan, memory: RankMemory) -> None:
    """Let the scheduler know what further rows of a forward cost here. Mutates: ring's scheduler."""
    # Where others share the stage a forward would wait for them: what is measured is all of it.
    stage = ModelRunner(model, ring.stage.device, 1, 3) if ring.stage.group is not None else ring.stage
    most, context = ring.scheduler.max_rows, plan.config.kv_context
    costs = balance.row_costs(stage, most, steps=plan.steps, kv_context=context, memory=memory)
    ring.scheduler.set_row_costs(costs)
    shown = ", ".join(f"{cost:.3g}" for cost in ring.scheduler.row_limit.costs)
    so = "" if ring.scheduler.row_limit.shares else "; so none share one"
    logger.info("batching: forwards of 1 to %d rows take %s times as long as of one%s", most, shown, so)


def _warm_up(pipeline: StreamingPipeline, config: ModelConfig) -> None:
    """Make one chunk, so that the first viewer does not pay for first calls, and some more to see what they take.

    Graphs are made for the configured KV context and a full window, so with them that is what is measured; a staircase
    needs newcomers. So it is on CUDA, where attention's kernels are planned anew for each length of a window that
    fills.
    """
    whole, spec = config.compile == "on" or pipeline.ring.stage.device.type == "cuda", pipeline.model.spec
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
    while pipeline.ring.has_work:  # newcomers of a staircase are still in it
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
