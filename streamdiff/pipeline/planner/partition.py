"""How a model is laid out over ranks, decided before the first chunk and never changed: blocks per stage, ranks that
share a stage, where decoding runs, and how many rows may share a forward. Pure: costs in, a layout out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from streamdiff.config import BatchingRule, ModelConfig, ServedModel
from streamdiff.core import PER_STEP
from streamdiff.errors import ConfigError
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.planner.costs import Costs, row_gflop
from streamdiff.pipeline.planner.model_sizes import ModelSizes

Blocks = tuple[tuple[int, int], ...]
"""(first, last) of each stage's run of blocks, last exclusive."""
PLACES = ("head", "last", "dedicated", "own-stream")


@dataclass(frozen=True)
class Workload:
    """What the ring is planned for: `sessions` alike sessions, up to `max_rows` rows in a forward; `shares` ranks share
    each stage."""

    stages: int
    sessions: int
    steps: int
    kv_context: str
    max_rows: int
    shares: int = 1

    @property
    def passes(self) -> int:
        """Forwards that a chunk takes."""
        return self.steps if self.kv_context in PER_STEP else self.steps + 1

    def decode_share(self, decode_s: float) -> float:
        """Seconds of decoding per full forward: it comes once in so many forwards as the chunk has passes, per row."""
        return decode_s * self.max_rows / self.passes


@dataclass(frozen=True)
class Layout:
    """`blocks[p]` is (first, last), last exclusive, of stage p; `stage_s[p][r - 1]` its seconds for r rows; `link_s[p]`
    those of a message from it to the next stage, the last one back to the head. `decode` is one of `PLACES`, and a
    chunk's decode takes `decode_s`."""

    blocks: Blocks
    stage_s: tuple[tuple[float, ...], ...]
    link_s: tuple[float, ...]
    decode: str
    decode_s: float

    @property
    def decode_stage(self) -> int | None:
        """The stage that decoding keeps busy; None where it runs beside the stages."""
        return {"head": 0, "last": len(self.blocks) - 1}.get(self.decode)

    @property
    def forward_s(self) -> float:
        """Seconds of a forward of one row through all stages."""
        return math.fsum(times[0] for times in self.stage_s)

    def slowest_s(self, load: Workload) -> float:
        """What the slowest stage takes for a full forward, its share of decoding included."""
        times = [times[load.max_rows - 1] for times in self.stage_s]
        if self.decode_stage is not None:
            times[self.decode_stage] += load.decode_share(self.decode_s)
        return max(times)


def choose_layout(costs: Costs, load: Workload, decode: str = "auto") -> Layout:
    """The fastest split of blocks; for `auto` also decode's place: rank 0 or the last rank, whichever is faster.

    Raises:
        ConfigError: more stages than blocks.
    """
    return fastest((_layout_with(costs, load, place) for place in places(decode)), load)


def places(decode: str) -> tuple[str, ...]:
    """Where decoding may be put: at `decode`, or for `auto` at the first or last rank."""
    return ("head", "last") if decode == "auto" else (decode,)


def fastest(layouts: Iterable[Layout], load: Workload) -> Layout:
    """That with the fastest full forwards; of those alike the first."""
    return min(layouts, key=lambda layout: layout.slowest_s(load))


def _layout_with(costs: Costs, load: Workload, decode: str) -> Layout:
    full, last = load.max_rows - 1, load.stages - 1
    extra = [0.0] * load.stages
    if (stage := {"head": 0, "last": last}.get(decode)) is not None:
        extra[stage] = load.decode_share(costs.decode_s)
    extra[0] += costs.embed_s[full]
    extra[last] += costs.head_s[full]
    blocks = split_blocks([times[full] for times in costs.block_s], extra)
    stage_s = []
    for rank, (first, end) in enumerate(blocks):
        parts = [*costs.block_s[first:end]]
        parts += [costs.embed_s] if rank == 0 else []
        parts += [costs.head_s] if rank == last else []
        stage_s.append(tuple(math.fsum(times) for times in zip(*parts, strict=True)))
    links = (*[costs.link_s] * last, costs.flow_s)
    return Layout(blocks, tuple(stage_s), links, decode, costs.decode_s)


# ---- blocks per stage ------------------------------------------------------------------------------------------


def split_blocks(block_s: Sequence[float], extra_s: Sequence[float]) -> Blocks:
    """Give each rank a contiguous run of blocks, at least one, so that the slowest rank is as fast as possible.

    Exact, by dynamic programming over (rank, blocks given out), O(ranks * blocks^2). Among the splits that are equally
    good by that, the most even one (least sum of squares); among those, the one whose first ranks have the most blocks.

    Args:
        block_s: seconds of each block.
        extra_s: what each rank spends on other things per forward: one entry per rank.

    Returns:
        (first, last) of each rank, last exclusive.

    Raises:
        ConfigError: no rank, or more ranks than blocks.
    """
    ranks, blocks = len(extra_s), len(block_s)
    check_stages(ranks, blocks)
    before = [0.0, *accumulate(block_s)]
    cost_of = [
        [[(before[j] - before[i]) + extra for j in range(blocks + 1)] for i in range(blocks + 1)] for extra in extra_s
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


def split_evenly(blocks: int, stages: int) -> Blocks:
    """Runs (first, last exclusive) of equal blocks, the longer ones first.

    Raises:
        ConfigError: a stage would have no block.
    """
    check_stages(stages, blocks)
    short, longer = divmod(blocks, stages)
    return tuple(pairwise(stage * short + min(stage, longer) for stage in range(stages + 1)))


# ---- what a model and its ranks allow --------------------------------------------------------------------------


def possible_shares(sizes: ModelSizes) -> list[int]:
    """Numbers of ranks that can share a stage: they share its heads and the tokens of a latent frame evenly."""
    most = math.gcd(sizes.heads, sizes.tokens // sizes.spec.chunk_latents)
    return [count for count in range(1, most + 1) if most % count == 0]


def check_stages(stages: int, blocks: int) -> None:
    """Raises ConfigError unless every stage can have a block."""
    if not 1 <= stages <= blocks:
        raise ConfigError(
            f"stages is {stages}, but must be 1 to {blocks}: every stage needs a block, and the model has {blocks}",
            field="model.stages",
        )


def check_ranks(config: ModelConfig, sizes: ModelSizes) -> None:
    """Raises ConfigError where a model of these sizes cannot be split over so many stages, these be shared so, or
    its blocks be offloaded."""
    if config.offload == "blocks" and config.quantize != "none":
        raise ConfigError(
            f"offload is blocks and quantize is {config.quantize}, whose weights are no plain tensors that could be "
            "copied ahead; use one of the two",
            field="model.offload",
        )
    if config.parallel is not None and int(config.parallel.split("x")[0]) != config.stages:
        raise ConfigError(
            f"stages is {config.stages}, but parallel is {config.parallel}, stages x ranks that share each; leave "
            "stages out",
            field="model.parallel",
        )
    check_stages(config.stages, sizes.blocks)
    if config.shares not in (possible := possible_shares(sizes)):
        fitting = ", ".join(map(str, possible[1:]))
        ways = f"{fitting} ranks can share one, or 1 has it alone" if fitting else "give each stage one rank"
        raise ConfigError(
            f"{config.shares} ranks are to share a stage (model.parallel), but they share heads and the tokens of a "
            f"latent frame evenly, and the model has {sizes.heads} heads and "
            f"{sizes.tokens // sizes.spec.chunk_latents} tokens: {ways}",
            field="model.parallel",
        )


# ---- rows of a forward -----------------------------------------------------------------------------------------


def max_rows_of(config: ModelConfig, sizes: ModelSizes) -> int:
    """Most rows of a forward of a configuration and its model, the same on all ranks. Only a server's sessions share
    forwards; the first rule that applies can lower what is configured, not raise it."""
    if not isinstance(config, ServedModel):
        return 1
    rule = next((rule for rule in config.batching.rules if _applies(rule, sizes, config.kv_context)), BatchingRule())
    return min(config.batching.max_rows, rule.max_rows or config.batching.max_rows)


def _applies(rule: BatchingRule, sizes: ModelSizes, kv_context: str) -> bool:
    """Whether all conditions that a rule has are met by a row of the model in this KV context."""
    spec = sizes.spec
    return (
        (rule.model is None or fnmatchcase(spec.name, rule.model))
        and (rule.size is None or rule.size == f"{spec.width}x{spec.height}")
        and (rule.min_tokens is None or sizes.tokens >= rule.min_tokens)
        and (rule.min_gflop is None or row_gflop(sizes, kv_context) >= rule.min_gflop)
    )


def rows_carried(spec: ModelSpec, max_rows: int) -> int:
    """Most rows of a forward, which the ring's links must be able to carry."""
    return max(max_rows, spec.first_chunks)
