"""A rank of a ring: loads what its plan says, connects it, makes its graphs, and on all ranks but 0 runs its loops."""

from __future__ import annotations

import atexit
import signal
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch

from streamdiff.config import ModelConfig
from streamdiff.device import bind, own_device
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, rgb24, yuv420p
from streamdiff.models.loader import awaited_bytes, load_text_encoder
from streamdiff.models.model import Model, StageModel
from streamdiff.pipeline import load_plan
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS, DecodeWorker
from streamdiff.pipeline.distributed.heartbeat import RankLoop, RankWatch, exit_now, link_fault
from streamdiff.pipeline.distributed.link import LinkClosed, Receiver, Sender
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.distributed.state_exchange import StoreExchange
from streamdiff.pipeline.load_plan import LoadPlan, plan_rank
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.ring import RingParts
from streamdiff.pipeline.runner import block_offload
from streamdiff.pipeline.runner.graphs import capture_on, keep_compiled_code, one_graph
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.topology import StageTopology, connect_stage, decode_links, join_edges
from streamdiff.session_state.swap_store import SwapStore


@dataclass(frozen=True)
class LoadedRank:
    """The parts of one rank. `model` is None on a rank that only decodes, a `Model` on rank 0; `decoder` is None where
    another rank decodes. `memory` is what there is for sessions, now that the weights are loaded; `swaps` keeps those
    that are swapped out; `keeps_cameras` as of `ModelRunner`."""

    model: StageModel | None
    decoder: PictureDecoder | None
    memory: RankMemory
    swaps: SwapStore
    keeps_cameras: bool = False


def load_rank(plan: LoadPlan) -> LoadedRank:
    """Load the parts of `plan`. Mutates: torch's flag for cuDNN.

    Raises:
        ConfigError: parts that are missing or do not fit; or as `LoadPlan.swap_store`.
    """
    config, spec, device, found = plan.config, plan.spec, plan.device, plan.models.model
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = plan.cudnn_benchmark
        # After a trial torch would free what it keeps, and so wait for all that the device does, live streams included.
        getattr(torch._C, "_cudnn_set_conv_benchmark_empty_cache", bool)(False)  # a build without CUDA has none
    decoder = _load_decoder(plan) if plan.rank == config.decode_rank_number and not plan.reference else None
    text = reencoder = None
    model = None if plan.kernels is None else _load_stage(plan)
    if model is not None and plan.rank == 0:
        if not plan.reference:
            text = load_text_encoder(found, config, spec.text_shape, device)
        if spec.context_pictures:
            dtype = torch.float32 if plan.reference else plan.models.decoder_dtype
            reencoder = load_autoencoder(found.found_vae, "both", device, dtype, config.latent_space)
        model = Model(spec, model.denoiser, text, decoder, reencoder)
    remembering = [each for each in (decoder, reencoder) if each is not None]
    remembered = sum(each.stream_bytes(spec.latent_height, spec.latent_width) for each in remembering)
    free = plan.session_bytes()
    if text is not None and device.type == "cuda":
        free = max(0, free - awaited_bytes(text, device))
    cameras = plan.kept_cameras(free)
    memory = RankMemory(free - cameras * plan.graph_rows, remembered + cameras, plan.swap_bytes)
    return LoadedRank(model, decoder, memory, plan.swap_store(), cameras > 0)


def _load_decoder(plan: LoadPlan) -> PictureDecoder:
    found, space = plan.models.model.found_vae, plan.config.latent_space
    network = load_autoencoder(found, "decoder", plan.device, plan.models.decoder_dtype, space)
    # On one busy core, in turns: TAEHV's decoder 1.06 to 1.17 times as fast with channels last, Wan's 0.9.
    if plan.channels_last is not None:
        network.set_channels_last(plan.channels_last)
    layout = {"rgb": rgb24, "yuv420": yuv420p}[plan.pixel_format]
    return PictureDecoder(network, layout)


def _load_stage(plan: LoadPlan) -> StageModel:
    """The rank's run of the transformer's blocks."""
    offloaded = plan.config.offload != "none"
    run = plan.runs[plan.rank // plan.config.shares]
    denoiser = plan.models.transformer(run, plan.kernels, torch.device("cpu") if offloaded else None)
    return StageModel(plan.spec, block_offload.offload(denoiser, plan.device) if offloaded else denoiser)


def compile_stage(plan: LoadPlan, stage: ModelRunner, memory: RankMemory, watch: RankWatch) -> None:
    """Make the stage's graphs, if the configuration wants them, for as many sessions as keep the ring busy and have
    room. Takes minutes, and talks to no other rank: so all ranks do it at the same time, and `RankContext.meet`
    afterwards. Mutates: stage, watch."""
    if (kept := plan.preallocated) is not None:
        keep_compiled_code()
        stage.compile(kept, memory=memory, max_rows=plan.max_rows, on_progress=watch.report_graphs)


def compile_decoder(plan: LoadPlan, decoder: PictureDecoder | None, threads: int) -> None:
    """Make the decoder's graphs, if there is one and the configuration wants them, for a thread that decodes with
    so many CPU threads. Takes from seconds to minutes. Mutates: decoder."""
    if decoder is not None and plan.config.compile == "on":
        keep_compiled_code()
        latents = torch.zeros(plan.spec.chunk_shape, device=plan.device)

        def enter() -> None:
            torch.set_num_threads(threads)
            bind(plan.device)

        with ThreadPoolExecutor(1, "compile", enter) as alike:
            alike.submit(decoder.compile, latents, plan.decode_latents, one_graph, capture_on(plan.device)).result()


class StartedRank(NamedTuple):
    """A rank that is loaded and connected. `parts`: its stage and links, None on a rank that only decodes.
    `decode_links` lead from the head to a rank that decodes for it and back, or there from and to the head; None: the
    head decodes. `memories` are those of all ranks, on the head."""

    plan: LoadPlan
    loaded: LoadedRank
    parts: RingParts | None
    decode_links: tuple[Sender, Receiver] | None
    watch: RankWatch
    memories: list[RankMemory]

    @property
    def head(self) -> tuple[Model, RingParts]:
        """What it has as rank 0."""
        assert isinstance(self.loaded.model, Model) and self.parts is not None, "this is rank 0"
        return self.loaded.model, self.parts


def start_rank(plan: LoadPlan, context: RankContext | None) -> StartedRank:
    """Load this rank, connect it to the others if there are some, and make its graphs. `context` as `plan.join` has it.

    Raises:
        ConfigError: parts that are missing, or a ring that cannot be built.
    """
    config, device, number = plan.config, plan.device, 0 if context is None else context.rank
    watch = RankWatch(context, config.stages, config.shares)
    plan = plan_rank(plan, context)
    loaded, place = load_rank(plan), StageTopology.of(config, number, device, plan.max_rows)
    if context is not None:
        context.send_memory(loaded.memory)
    parts = links = None
    if loaded.model is not None:
        parts = connect_stage(loaded.model, place, device, watch.enter)
        parts.stage.swaps, parts.stage.keeps_cameras = loaded.swaps, loaded.keeps_cameras
        if context is not None:
            parts.stage.exchange = StoreExchange(context.store)
    else:
        join_edges(place, plan.spec, device)
    watch.enter("graphs")
    if config.decode_rank_number and number in (0, config.decode_rank_number):
        links = decode_links(plan.spec, number, config.decode_rank_number, device, plan.pixel_format)
    if parts is not None:
        compile_stage(plan, parts.stage, loaded.memory, watch)
    # Beside a stage it has a thread of its own, alone it is the process.
    compile_decoder(plan, loaded.decoder, DECODE_THREADS if parts is not None else torch.get_num_threads())
    memories = [loaded.memory] if context is None else context.receive_memories() if number == 0 else []
    watch.ready()
    return StartedRank(plan, loaded, parts, links, watch, memories)


# ---- all ranks but rank 0 --------------------------------------------------------------------------------------------

GRACE_S = 10.0
"""How long a rank waits after SIGTERM for rank 0 to end the ring."""


def run_worker(config: ModelConfig) -> None:
    """Run a stage until rank 0 stops the ring. The process ends with exit code 1 when the ring breaks.

    Raises:
        ConfigError: the ring cannot be built as configured.
    """
    run_rank(load_plan.plan_load(config, own_device(config.device)))


def run_rank(plan: LoadPlan) -> None:
    """As `run_worker`, of what a plan says."""
    context = plan.join()
    if context is None:
        raise ConfigError(
            "there is nothing to work for: the ring has one rank, which is rank 0; give --stages or --parallel "
            "(Python: stages, parallel), the same as on rank 0, under torchrun"
        )
    rank = start_rank(plan, context)
    loaded, device, loops = rank.loaded, plan.device, list[RankLoop]()
    if rank.parts is not None:
        loops.append(rank.parts.worker())
    if loaded.decoder is not None and rank.decode_links is not None:
        sender, receiver = rank.decode_links
        timer, exchange = loops[0].timer if loops else None, StoreExchange(context.store)
        at_once = rank.plan.decode_latents
        loops.append(DecodeWorker(loaded.decoder, receiver, sender, device, at_once, timer, exchange, loaded.swaps))
    work(loops, rank.watch, plan.config.watchdog_s, device)
    loaded.swaps.close()


def work(workers: Sequence[RankLoop], watch: RankWatch, watchdog_s: float, device: torch.device) -> None:
    """Run the loops of this rank to their end, each but the first on a thread of its own. Mutates: the process's signal
    handlers."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_later)
    atexit.register(exit_now)
    watch.begin(workers, watchdog_s)
    others = [
        threading.Thread(target=_run_on_thread, args=(worker, watch, device), daemon=True) for worker in workers[1:]
    ]
    for thread in others:
        thread.start()
    _run(workers[0], watch)
    for thread in others:
        thread.join()
    watch.finish()
    atexit.unregister(exit_now)


def _run_on_thread(worker: RankLoop, watch: RankWatch, device: torch.device) -> None:
    """Run a second loop on a thread; the rank ends with it."""
    torch.set_num_threads(DECODE_THREADS)
    bind(device)
    threading.excepthook = _exit_on_error
    _run(worker, watch)


def _exit_on_error(raised: threading.ExceptHookArgs) -> None:
    if raised.exc_value is not None:
        traceback.print_exception(raised.exc_value)
    exit_now()


def _run(worker: RankLoop, watch: RankWatch) -> None:
    """Run a loop; if it raises, report the fault to the other ranks, with what was being executed, and re-raise."""
    assert watch.context is not None, "a worker has others"
    rank = watch.context.rank
    try:
        worker.run()
    except LinkClosed as error:
        exit_now(f"rank {rank} ends: {watch.report(link_fault(error, rank, worker, watch))}")
    except Exception as error:
        error.add_note(f"on rank {rank}, {worker.where()}")
        watch.report(f"rank {rank} failed {worker.where()}: {type(error).__name__}: {error}")
        raise


def _exit_later(number: int, frame: FrameType | None) -> None:
    """Exit after `GRACE_S`: launcher and terminal signal all ranks at once, and rank 0 then ends the ring in order."""
    timer = threading.Timer(GRACE_S, exit_now)
    timer.daemon = True
    timer.start()
