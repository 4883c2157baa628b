"""How the blocks are shared out: from costs that are measured once at the start, or read from a profile.

Decided before the first chunk and never changed afterwards, so no chunk in flight ever moves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.model import StageModel
from streamdiff.models.spec import choose_steps
from streamdiff.models.transformer.wan import Tokens
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.planner.costs import Costs, in_proportion, read_profile
from streamdiff.pipeline.planner.model_sizes import ModelSizes
from streamdiff.pipeline.planner.stage_layout import Workload, lay_out
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.scheduler.step import MicroStep

ROUNDS = 5
"""Forwards that are timed; the median counts."""


@dataclass(frozen=True)
class Measured:
    """Seconds on one rank: of a block, and of what only one rank does: embedding, output layer, a chunk's decode."""

    block_s: float
    embed_s: float = 0.0
    head_s: float = 0.0
    decode_s: float = 0.0


def measure(
    model: StageModel, decoder: PictureDecoder | None, device: torch.device, place: tuple[int, int], kv_context: str
) -> Measured:
    """Time this rank's parts, with the attention window full. `place` is (rank, stages)."""
    rank, stages = place
    spec, denoiser = model.spec, model.denoiser
    stage = ModelRunner(model, device, 1, 3)  # the one in the middle has blocks alone
    stage.open(0, steps=spec.steps[0], kv_context=kv_context)
    stage.set_text(0, 0, torch.zeros(spec.text_shape, device=device, dtype=denoiser.dtype), 0)
    latents = torch.zeros(1, *spec.chunk_shape, device=device, dtype=denoiser.dtype)
    grid, frames = spec.chunk_shape[1:], spec.chunk_latents // denoiser.patch[0]
    shape = (denoiser.tokens(grid), denoiser.width)
    tokens = Tokens(*(torch.zeros(1, *s, device=device, dtype=denoiser.dtype) for s in (shape, (frames, shape[1]))))
    row = MicroStep(0, spec.window_chunks(kv_context), 0, spec.steps[0], 0)
    forward_s = _seconds(lambda: stage.forward([row], tuple(tokens)), device)
    embed_s = head_s = decode_s = 0.0
    if rank == 0:
        timestep = torch.zeros(1, spec.chunk_latents, device=device)
        embed_s = _seconds(lambda: denoiser.embed(latents, timestep), device)
    if decoder is not None:
        memory = decoder.new_memory()
        decode_s = _seconds(lambda: decoder.decode(latents, memory), device)
    if rank == stages - 1:
        head_s = _seconds(lambda: denoiser.head(tokens, grid), device)
    return Measured(forward_s / len(denoiser.blocks), embed_s, head_s, decode_s)


def share_out(
    config: ModelConfig, sizes: ModelSizes, context: RankContext, own: Measured | None
) -> tuple[tuple[int, int], ...]:
    """The runs of blocks (first, last exclusive) of all ranks; every rank gets the same answer.

    `own` is what this rank has measured, or None where the configuration names a profile.

    Raises:
        ConfigError: a profile that cannot be read, or more stages than blocks.
    """
    if own is None:
        costs = read_profile(Path(config.profile or ""), sizes, max_rows=1)
    else:
        context.store.set(f"cost/{context.rank}", json.dumps(asdict(own)))
        first_ranks = range(0, config.stage_ranks, config.shares)
        everybody = [Measured(**json.loads(context.store.get(f"cost/{rank}"))) for rank in first_ranks]
        costs = _combined(everybody, sizes.blocks, config.shares)
    steps = choose_steps(config.steps, sizes.spec.steps, sizes.spec.name)
    workload = Workload(config.stages, 1, steps, config.kv_context, 1, config.anchor_every or 0)
    return lay_out(costs, workload, decode_place(config)).blocks


def decode_place(config: ModelConfig) -> str:
    """Where decoding counts: a thread of the head costs it nothing if there is a core that no rank needs."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(config.ranks)))
    spare_core = (os.cpu_count() or 1) > here
    return "own-stream" if config.decode == "head" and spare_core else config.decode


def _combined(everybody: list[Measured], blocks: int, shares: int) -> Costs:
    """Blocks are alike, and a rank that was disturbed only measured too much. Blocks and output layer, which were
    measured whole, take `shares` ranks so much less time; what these exchange is not counted."""
    block_s = min(measured.block_s for measured in everybody) / shares
    return Costs(
        source="measured at the start",
        block_s=(in_proportion(block_s, 1),) * blocks,
        embed_s=in_proportion(everybody[0].embed_s, 1),
        head_s=in_proportion(everybody[-1].head_s / shares, 1),
        decode_s=max(measured.decode_s for measured in everybody),
        link_s=0.0,
        flow_s=0.0,
    )


@torch.inference_mode()
def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of some runs after one that is not counted."""
    spent = []
    for _ in range(1 + ROUNDS):
        begun_s = clock.monotonic_s()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(clock.monotonic_s() - begun_s)
    return median(spent[1:])
