"""A runtime from a configuration: weights loaded, ranks joined, graphs made, a first chunk behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streamdiff.config import ModelConfig
from streamdiff.pipeline import topology
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS
from streamdiff.pipeline.distributed.compile_progress import Progress
from streamdiff.pipeline.distributed.rendezvous import check_world
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget
from streamdiff.pipeline.profile_report import CHUNKS
from streamdiff.pipeline.profiler import ProfiledRuntime, check_folder, check_traced
from streamdiff.pipeline.rank_loader import RankLoader, Run, own_device
from streamdiff.pipeline.scheduler.kv_context import in_flight_limit
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.pipeline.worker_group import WorkerGroup

_MEASURED_CHUNKS = 3


def load_runtime(config: ModelConfig) -> StreamingPipeline:
    """Load the model's weights, as the head of a ring if there are several stages, and warm up with one chunk.

    Raises:
        ConfigError: unknown model, a device that is not there, or a ring that cannot be built.
    """
    device = own_device(config.device)
    loader = RankLoader(config, device)
    decoder = loader.load_decoder() if config.decode_rank == 0 else None
    company: WorkerGroup | None = None
    runs: tuple[Run, ...]
    if config.ranks == 1:
        check_world(1, 1)
        model = loader.load_model()
        runs, rooms = ((0, model.blocks),), [loader.session_memory(decoder, model.past, model.text)]
        ring = RingExecutor(model, device, clean_with_next=config.clean_with_next)
        loader.compile_stage(ring.stage, rooms[0], Progress(None, 1))
        loader.compile_decoder(decoder, DECODE_THREADS)
    else:
        member = loader.join()
        model, runs = loader.load_share(member, loader.load_model, decoder)
        member.tell_room(room := loader.session_memory(decoder, model.past, model.text))
        ring = topology.head_ring(model, topology.StageTopology.of(config, 0, device), device)
        links = None
        if decoder is None:
            links = topology.decode_links(model.spec, 0, config.decode_rank, device, loader.pixel_format)
        progress = Progress(member, config.stages)
        loader.compile_stage(ring.stage, room, progress)
        loader.compile_decoder(decoder, DECODE_THREADS)
        company = WorkerGroup(member, ring, config.hang_s, links)
        rooms = member.hear_rooms()
        member.meet(progress.made)
    model = replace(model, decoder=decoder)
    counts = [last - first for first, last in runs] + [0] * (config.ranks - config.stages)
    budget = KVCacheBudget(loader.sizes, rooms, counts, model.denoiser.dtype.itemsize, loader.preallocated_caches())
    at_once = loader.decode_at_once
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
