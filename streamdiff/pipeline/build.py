"""A runtime from a configuration: weights loaded, ranks joined, graphs made, a first chunk behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streamdiff.config import ModelConfig
from streamdiff.pipeline import rank_loader, topology
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS
from streamdiff.pipeline.distributed.compile_progress import Progress
from streamdiff.pipeline.distributed.rendezvous import check_world
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget
from streamdiff.pipeline.profile_report import CHUNKS
from streamdiff.pipeline.profiler import ProfiledRuntime, check_folder, check_traced
from streamdiff.pipeline.scheduler.kv_context import in_flight_limit
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.pipeline.worker_group import WorkerGroup

_MEASURED_CHUNKS = 3


def load_runtime(config: ModelConfig) -> StreamingPipeline:
    """Load the model's weights, as the head of a ring if there are several stages, and warm up with one chunk.

    Raises:
        ConfigError: unknown model, a device that is not there, or a ring that cannot be built.
    """
    device = rank_loader.own_device(config.device)
    decoder = rank_loader.load_decoder(config, device) if config.decode_rank == 0 else None
    company: WorkerGroup | None = None
    runs: tuple[rank_loader.Run, ...]
    if config.ranks == 1:
        check_world(1, 1)
        model = rank_loader.load_model(config, device)
        runs, rooms = ((0, model.blocks),), [rank_loader.own_room(config, device, decoder, model.past, model.text)]
        ring = RingExecutor(model, device, clean_with_next=config.clean_with_next)
        rank_loader.compile_stage(config, ring.stage, rooms[0], Progress(None, 1))
        rank_loader.compile_decoder(config, decoder, device, DECODE_THREADS)
    else:
        member = rank_loader.join(config)
        model, runs = rank_loader.load_share(
            config, member, device, lambda blocks: rank_loader.load_model(config, device, blocks), decoder
        )
        member.tell_room(room := rank_loader.own_room(config, device, decoder, model.past, model.text))
        ring = topology.head_ring(model, topology.StageTopology.of(config, 0, device), device)
        links = None
        if decoder is None:
            kind = rank_loader.pictures_of(config, device)
            links = topology.decode_links(model.spec, 0, config.decode_rank, device, kind)
        progress = Progress(member, config.stages)
        rank_loader.compile_stage(config, ring.stage, room, progress)
        rank_loader.compile_decoder(config, decoder, device, DECODE_THREADS)
        company = WorkerGroup(member, ring, config.hang_s, links)
        rooms = member.hear_rooms()
        member.meet(progress.made)
    model = replace(model, decoder=decoder)
    counts = [last - first for first, last in runs] + [0] * (config.ranks - config.stages)
    kept = rank_loader.waiting(config, device)
    budget = KVCacheBudget(rank_loader.facts_of(config), rooms, counts, model.denoiser.dtype.itemsize, kept)
    at_once = rank_loader.at_once(config, device)
    runtime = StreamingPipeline(
        model, device, config.steps, config.kv_context, company, budget, ring, at_once, config.hang_s
    )
    _warm_up(runtime, config)
    runtime.occupancy()  # counts from here
    return runtime


def _warm_up(runtime: StreamingPipeline, config: ModelConfig) -> None:
    """Make one chunk, so that the first viewer does not pay for first calls, and some more to see what they take.

    Graphs are made for the configured KV context and a full window, so with them that is what is measured; a staircase
    needs newcomers.
    """
    compiled, spec = config.compile == "on", runtime.model.spec
    kv_context = config.kv_context if compiled else "clean"
    before = max(spec.window_chunks(kv_context), spec.first_chunks) if compiled else 1
    steps = runtime.info.steps
    room = in_flight_limit(kv_context, steps=steps, stages=config.stages)
    conditioning = runtime.text.encode(runtime.text.read(runtime.text.examples[0], None).text)
    runtime.open(0, conditioning, seed=0, epoch=0, steps=steps, kv_context=kv_context)
    for number in range(before + _MEASURED_CHUNKS):
        if number == before:
            runtime.measure_from_here()
        left = spec.first_chunks if number == 0 else 1
        runtime.set_room(0, max(room, left) * runtime.info.chunk_frames)
        while left > 0:
            left -= sum(frames.last for frames in runtime.step(wait_s=1.0))
    runtime.measure_to_here()
    runtime.close_session(0)
    while runtime.ring.has_work:  # newcomers of a staircase are still in it
        runtime.step(wait_s=1.0)


def load_pipeline(config: ModelConfig) -> StreamingPipeline | ProfiledRuntime:
    """`load_runtime`, and traced for a while where the configuration names a folder.

    Raises:
        ConfigError: as `load_runtime`, `check_folder` and `check_traced`.
    """
    check_traced(config.trace, config.trace_chunks)
    if config.trace is None:
        return load_runtime(config)
    check_folder(Path(config.trace))
    return ProfiledRuntime(load_runtime(config), Path(config.trace), config.trace_chunks or CHUNKS)
