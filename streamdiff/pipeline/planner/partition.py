"""Splits transformer blocks over stages so that the slowest stage is as fast as possible. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.model_sizes import ModelSizes


def split_blocks(
    block_s: Sequence[float], extra_s: Sequence[float], slowness: Sequence[float] | None = None
) -> tuple[tuple[int, int], ...]:
    """Give each rank a contiguous run of blocks, at least one, so that the slowest rank is as fast as possible.

    Exact, by dynamic programming over (rank, blocks given out), O(ranks * blocks^2). Among the splits that are equally
    good by that, the most even one (least sum of squares); among those, the one whose first ranks have the most blocks.

    Args:
        block_s: seconds of each block.
        extra_s: what each rank spends on other things per forward: one entry per rank.
        slowness: how many times as long as `block_s` each rank takes for a block; None: all the same.

    Returns:
        (first, last) of each rank, last exclusive.

    Raises:
        ConfigError: no rank, more ranks than blocks, or a time that is negative or not finite.
    """
    ranks, blocks = len(extra_s), len(block_s)
    check_stages(ranks, blocks)
    slowness = slowness or [1.0] * ranks
    for time_s in (*block_s, *extra_s, *slowness):
        if not 0 <= time_s < math.inf:
            raise ConfigError(f"a time to split by is {time_s:g} s; it must be 0 or more")
    before = [0.0, *accumulate(block_s)]
    cost_of = [
        [[slow * (before[j] - before[i]) + extra for j in range(blocks + 1)] for i in range(blocks + 1)]
        for extra, slow in zip(extra_s, slowness, strict=True)
    ]
    slowest = [0.0] + [math.inf] * blocks  # of the ranks so far, by blocks given out
    for cost in cost_of:
        slowest = [min((max(slowest[i], cost[i][j]) for i in range(j)), default=math.inf) for j in range(blocks + 1)]
    bound = slowest[blocks]
    # (Sum of squares, where the runs end); ends are negative, so that among equal sums long first runs are the least.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))] + [(math.inf, ())] * blocks
    for cost in cost_of:
        best = [
            min(
                (
                    (best[i][0] + cost[i][j] ** 2, (*best[i][1], -j))
                    for i in range(j)
                    if cost[i][j] <= bound and best[i][1]
                ),
                default=(math.inf, ()),
            )
            for j in range(blocks + 1)
        ]
    return tuple(pairwise(-end for end in best[blocks][1]))


def split_evenly(blocks: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Runs (first, last exclusive) of equal blocks, the longer ones first.

    Raises:
        ConfigError: a stage would have no block.
    """
    check_stages(stages, blocks)
    return split_blocks([1.0] * blocks, [0.0] * stages)


def check_ranks(config: ModelConfig, sizes: ModelSizes) -> None:
    """Raises ConfigError where a model of these sizes cannot be split over so many stages, these be shared so, or its
    blocks be offloaded."""
    check_offload(config.offload, config.quantize)
    check_parallel(config.parallel, config.stages)
    check_stages(config.stages, sizes.blocks)
    check_shares(config.shares, sizes)


def possible_shares(sizes: ModelSizes) -> list[int]:
    """Numbers of ranks that can share a stage: they share its heads and the tokens of a latent frame evenly."""
    most = math.gcd(sizes.heads, sizes.tokens // sizes.spec.chunk_latents)
    return [count for count in range(1, most + 1) if most % count == 0]


def check_shares(shares: int, sizes: ModelSizes) -> None:
    """Raises ConfigError unless so many ranks can share a stage of a model of these sizes."""
    if shares not in (possible := possible_shares(sizes)):
        fitting = ", ".join(map(str, possible[1:]))
        ways = f"{fitting} ranks can share one, or 1 has it alone" if fitting else "give each stage one rank"
        raise ConfigError(
            f"{shares} ranks are to share a stage (model.parallel), but they share heads and the tokens of a latent "
            f"frame evenly, and the model has {sizes.heads} heads and {sizes.tokens // sizes.spec.chunk_latents} "
            f"tokens: {ways}"
        )


def check_parallel(parallel: str | None, stages: int) -> None:
    """Raises ConfigError where `parallel`, PxC, and `stages` are both given and say different things."""
    if parallel is not None and int(parallel.split("x")[0]) != stages:
        raise ConfigError(
            f"stages is {stages}, but parallel is {parallel}, stages x ranks that share each; leave stages out"
        )


def check_offload(offload: str, quantize: str) -> None:
    """Raises ConfigError where blocks are to be offloaded whose weights no copy ahead can take."""
    if offload == "blocks" and quantize != "none":
        raise ConfigError(
            f"offload is blocks and quantize is {quantize}, whose weights are no plain tensors that could be copied "
            "ahead; use one of the two"
        )


def check_stages(stages: int, blocks: int) -> None:
    """Raises ConfigError unless every stage can have a block."""
    if not 1 <= stages <= blocks:
        raise ConfigError(
            f"stages is {stages}, but must be 1 to {blocks}: every stage needs a block, and the model has {blocks}"
        )
