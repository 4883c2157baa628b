"""Costs measured once at the start: those by which blocks are assigned to stages, where no profile has them, and those
of further rows of a forward.

The shares are decided before the first chunk and never changed afterwards, so no chunk in flight ever moves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.model import StageModel
from streamdiff.models.transformer.wan import TokenStates
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.planner.costs import Costs, in_proportion
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.planner.partition import Blocks, Workload, choose_layout
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.session_state import walk

ROUNDS = 5
"""Forwards that are timed; the median counts, for `row_costs` the shortest."""


def measure(
    model: StageModel, decoder: PictureDecoder | None, device: torch.device, place: tuple[int, int], kv_context: str
) -> dict[str, float]:
    """Seconds of this rank's parts, with the attention window full: `block_s` of a block, and of what only one rank
    does `embed_s`, `head_s` (the output layer) and `decode_s` (of a chunk). `place` is (rank, stages)."""
    rank, stages = place
    spec, denoiser = model.spec, model.denoiser
    stage = ModelRunner(model, device, 1, 3)  # the one in the middle has blocks alone
    stage.open(0, steps=spec.steps[0], kv_context=kv_context)
    stage.set_text(0, 0, torch.zeros(spec.text_shape, device=device, dtype=denoiser.dtype), 0)
    latents = torch.zeros(1, *spec.chunk_shape, device=device, dtype=denoiser.dtype)
    grid, frames = spec.chunk_shape[1:], spec.chunk_latents // denoiser.patch[0]
    shape = (denoiser.tokens(grid), denoiser.width)
    tokens = TokenStates(
        *(torch.zeros(1, *s, device=device, dtype=denoiser.dtype) for s in (shape, (frames, shape[1])))
    )
    row = MicroStep(0, spec.window_chunks(kv_context), 0, spec.steps[0], 0)
    timed: dict[str, Callable[[], object]] = {"block_s": lambda: stage.forward([row], tuple(tokens))}
    if rank == 0:
        timestep = torch.zeros(1, spec.chunk_latents, device=device)
        timed["embed_s"] = lambda: denoiser.embed(latents, timestep)
    if decoder is not None:
        memory = decoder.new_memory()
        timed["decode_s"] = lambda: decoder.decode(latents, memory)
    if rank == stages - 1:
        timed["head_s"] = lambda: denoiser.output_layer(tokens, grid)
    seconds = {part: _seconds(call, device) for part, call in timed.items()}
    return seconds | {"block_s": seconds["block_s"] / len(denoiser.blocks)}


def gather_costs(context: RankContext, own: Mapping[str, float], stages: int, shares: int, blocks: int) -> Costs:
    """Gather the measurements of all stages into costs, the same on every rank; waits for them. Blocks are alike, and a
    rank that was disturbed only measured too much. Blocks and output layer, which were measured whole, take `shares`
    ranks so much less time; their exchanges are not counted."""
    context.store.set(f"cost/{context.rank}", json.dumps(own))
    first_ranks = range(0, stages * shares, shares)
    everybody: list[dict[str, float]] = [json.loads(context.store.get(f"cost/{rank}")) for rank in first_ranks]
    return Costs(
        source="measured at the start",
        block_s=(in_proportion(min(measured["block_s"] for measured in everybody) / shares, 1),) * blocks,
        embed_s=in_proportion(everybody[0].get("embed_s", 0.0), 1),
        head_s=in_proportion(everybody[-1].get("head_s", 0.0) / shares, 1),
        decode_s=max(measured.get("decode_s", 0.0) for measured in everybody),
        link_s=0.0,
        flow_s=0.0,
    )


def assign_blocks(config: ModelConfig, steps: int, costs: Costs) -> Blocks:
    """The runs of blocks (first, last exclusive) of all ranks, for sessions of so many `steps`.

    Raises:
        ConfigError: more stages than blocks.
    """
    # Decoding on a thread of the head costs it nothing if there is a core that no rank needs.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(config.ranks)))
    spare_core = config.decode_rank == "head" and (os.cpu_count() or 1) > here
    workload = Workload(config.stages, 1, steps, config.kv_context, 1)
    return choose_layout(costs, workload, "own-stream" if spare_core else config.decode_rank).blocks


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


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of some runs after one that is not counted."""
    return median([_run_s(work, device) for _ in range(1 + ROUNDS)][1:])


@torch.inference_mode()
def _run_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run."""
    begun_s = clock.monotonic_s()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock.monotonic_s() - begun_s
