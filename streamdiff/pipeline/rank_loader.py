"""Loads what one rank runs, part by part, as its plan says; then makes its graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from streamdiff.device import bind
from streamdiff.models.autoencoder.autoencoder import FirstFrameReencoder, load_decoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, rgb24, yuv420p
from streamdiff.models.loader import awaited_bytes, load_text_encoder
from streamdiff.models.model import Model, StageModel
from streamdiff.pipeline import balance
from streamdiff.pipeline.distributed.rendezvous import RankContext, StartProgress
from streamdiff.pipeline.load_plan import LoadPlan, RankPlan
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.planner.memory import check_fit
from streamdiff.pipeline.planner.partition import Blocks
from streamdiff.pipeline.runner import block_offload
from streamdiff.pipeline.runner.graphs import capture_on, keep_compiled_code, one_graph
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.session_state.swap_store import SwapStore


@dataclass(frozen=True)
class LoadedRank:
    """What one rank runs. `model` is None on a rank that only decodes, a `Model` on rank 0; `decoder` is None where
    another rank decodes. `runs` are first and last block (exclusive) of each stage. `memory` is what there is for
    sessions, now that the weights are loaded; `swaps` keeps those that are swapped out."""

    model: StageModel | None
    decoder: PictureDecoder | None
    runs: Blocks
    memory: RankMemory
    swaps: SwapStore


def load_rank(plan: RankPlan, context: RankContext | None = None) -> LoadedRank:
    """Load the parts of `plan`; `context` is None where there is one rank. Mutates: torch's flag for cuDNN.

    Raises:
        ConfigError: parts that are missing or do not fit; or as `LoadPlan.swap_store`.
    """
    config, spec, device, found = plan.config, plan.spec, plan.device, plan.models.model
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = plan.cudnn_benchmark
        # After a trial torch would free what it keeps, and so wait for all that the device does, live streams included.
        getattr(torch._C, "_cudnn_set_conv_benchmark_empty_cache", bool)(False)  # a build without CUDA has none
    model, runs = None, plan.runs
    decoder = _load_decoder(plan) if plan.rank == config.decode_rank_number and not plan.reference else None
    text = reencoder = None
    if plan.kernels is not None:
        model, runs = _load_stage(plan, decoder, context)
    if model is not None and plan.rank == 0:
        if not plan.reference:
            text = load_text_encoder(found, config, spec.text_shape, device)
        if spec.context_pictures:
            dtype = torch.float32 if plan.reference else plan.models.decoder_dtype
            reencoder = FirstFrameReencoder.load(found.found_vae, device, dtype)
        model = Model(spec, model.denoiser, text, decoder, reencoder)
    remembering = [each for each in (decoder, reencoder) if each is not None]
    remembered = sum(each.stream_bytes(spec.latent_height, spec.latent_width) for each in remembering)
    free = plan.session_bytes(plan.rank, runs)
    if text is not None and device.type == "cuda":
        free = max(0, free - awaited_bytes(text, device))
    return LoadedRank(model, decoder, runs, RankMemory(free, remembered, plan.swap_bytes), plan.swap_store())


def _load_decoder(plan: RankPlan) -> PictureDecoder:
    network = load_decoder(plan.models.model.found_vae, plan.device, plan.models.decoder_dtype)
    # On one busy core, in turns: TAEHV's decoder 1.06 to 1.17 times as fast with channels last, Wan's 0.9.
    if plan.channels_last is not None:
        network.set_channels_last(plan.channels_last)
    layout = {"rgb": rgb24, "yuv420": yuv420p}[plan.pixel_format]
    return PictureDecoder(network, layout)


def _load_stage(
    plan: RankPlan, decoder: PictureDecoder | None, context: RankContext | None
) -> tuple[StageModel, Blocks]:
    """The rank's run of the transformer's blocks, and the runs of all. Each stage of a ring measures
    the even share that it has loaded; where its share then turns out to be another, that one is loaded instead."""
    config, runs, stage = plan.config, plan.runs, plan.rank // plan.config.shares
    even = context is not None and not plan.reference
    host = torch.device("cpu") if config.offload != "none" else None
    while True:
        denoiser = plan.models.transformer(runs[stage], plan.kernels, host)
        if host is not None:
            denoiser = block_offload.offload(denoiser, plan.device)
        model = StageModel(plan.spec, denoiser)
        if context is None or not even:
            return model, runs
        measured = balance.measure(model, decoder, plan.device, (stage, config.stages), config.kv_context)
        costs = balance.gather_costs(context, measured, config.stages, config.shares, plan.sizes.blocks)
        before, runs = runs, balance.assign_blocks(config, plan.steps, costs)
        if runs[stage] == before[stage]:
            return model, runs
        check_fit(plan.demand(runs), plan.rank, plan.limits)
        even = False
        del model, denoiser  # two at once may be more than there is memory for


def compile_stage(plan: LoadPlan, stage: ModelRunner, memory: RankMemory, progress: StartProgress) -> None:
    """Make the stage's graphs, if the configuration wants them, for as many sessions as keep the ring busy and have
    room. Takes minutes, and talks to no other rank: so all ranks do it at the same time, and `RankContext.meet`
    afterwards. Mutates: stage, progress."""
    if (kept := plan.preallocated) is not None:
        keep_compiled_code()
        stage.compile(
            kept,
            memory=memory,
            max_rows=plan.max_rows,
            on_progress=progress.report,
        )


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
