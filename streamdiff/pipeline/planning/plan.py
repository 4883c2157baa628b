"""Blocks per stage, the place of decode, memory per rank: decided from costs before the first chunk, never moved after.

Pure: costs and sizes in, a plan out. No torch, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from streamdiff.errors import ConfigError
from streamdiff.pipeline.planning.costs import Costs, total
from streamdiff.pipeline.planning.facts import Facts

PLACES = ("head", "last", "own-rank", "own-stream")


@dataclass(frozen=True)
class Workload:
    """What the ring is planned for: `sessions` alike sessions, up to `max_rows` rows in a forward."""

    stages: int
    sessions: int
    steps: int
    kv_context: str
    max_rows: int

    @property
    def passes(self) -> int:
        """Forwards that a chunk takes."""
        return self.steps if self.kv_context == "matched" else self.steps + 1


@dataclass(frozen=True)
class Layout:
    """`blocks[p]` is (first, last), last exclusive, of stage p; `stage_s[p][r - 1]` its seconds for r rows.

    `decode` is one of `PLACES`; `slowest_s` is what the slowest rank needs per full forward, its share of decoding
    included.
    """

    blocks: tuple[tuple[int, int], ...]
    stage_s: tuple[tuple[float, ...], ...]
    decode: str
    slowest_s: float

    @property
    def decode_stage(self) -> int | None:
        """The stage that decoding keeps busy, or None where it runs beside the stages."""
        return {"head": 0, "last": len(self.blocks) - 1}.get(self.decode)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. Activations are the link's slots and the widest moment of a block, an estimate; `decoding` is
    what the decoder remembers of streams."""

    rank: int
    role: str
    weights: int
    caches: int
    activations: int
    decoding: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.activations + self.decoding


def split_blocks(block_s: Sequence[float], extra_s: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Give each rank a contiguous run of blocks, at least one, so that the slowest rank is as fast as possible.

    Exact, by dynamic programming over (rank, blocks given out), O(ranks * blocks^2). Among the splits that are equally
    good by that, the most even one (least sum of squares); among those, the one whose first ranks have the most blocks.

    Args:
        block_s: seconds of each block.
        extra_s: what each rank spends on other things per forward: one entry per rank.

    Returns:
        (first, last) of each rank, last exclusive.

    Raises:
        ConfigError: no rank, more ranks than blocks, or a time that is negative or not finite.
    """
    ranks, blocks = len(extra_s), len(block_s)
    check_stages(ranks, blocks)
    for time_s in (*block_s, *extra_s):
        if not 0 <= time_s < math.inf:
            raise ConfigError(f"a time to split by is {time_s:g} s; it must be 0 or more")
    before = [0.0, *accumulate(block_s)]
    cost_of = [
        [[before[j] - before[i] + extra for j in range(blocks + 1)] for i in range(blocks + 1)] for extra in extra_s
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


def check_stages(stages: int, blocks: int) -> None:
    """Raises ConfigError unless every stage can have a block."""
    if not 1 <= stages <= blocks:
        raise ConfigError(
            f"stages is {stages}, but must be 1 to {blocks}: every stage needs a block, and the model has {blocks}"
        )


def lay_out(costs: Costs, load: Workload, decode: str = "auto") -> Layout:
    """The fastest split of blocks; for `auto` also decode's place: the head or the last rank, whichever is faster.

    Times are compared for full forwards. A chunk's decode counts with its share of one forward: it comes once in so
    many forwards as the chunk has passes, per row.

    Raises:
        ConfigError: more stages than blocks.
    """
    places = ("head", "last") if decode == "auto" else (decode,)
    return min((_lay_out(costs, load, place) for place in places), key=lambda layout: layout.slowest_s)


def _lay_out(costs: Costs, load: Workload, decode: str) -> Layout:
    check_stages(load.stages, len(costs.block_s))
    full = load.max_rows - 1
    last = load.stages - 1
    extra = [0.0] * load.stages
    extra[0] += costs.embed_s[full]
    extra[last] += costs.head_s[full]
    place = {"head": 0, "last": last}.get(decode)
    if place is not None:
        extra[place] += costs.decode_s * load.max_rows / load.passes
    blocks = split_blocks([times[full] for times in costs.block_s], extra)
    stage_s = []
    for rank, (first, end) in enumerate(blocks):
        parts = [*costs.block_s[first:end]]
        parts += [costs.embed_s] if rank == 0 else []
        parts += [costs.head_s] if rank == last else []
        stage_s.append(total(parts))
    decode_share = [costs.decode_s * load.max_rows / load.passes if rank == place else 0.0 for rank in range(last + 1)]
    slowest = max(times[full] + share for times, share in zip(stage_s, decode_share, strict=True))
    return Layout(blocks, tuple(stage_s), decode, slowest)


def memory(
    facts: Facts, layout: Layout, load: Workload, value_bytes: int, quantize: str = "none"
) -> tuple[Memory, ...]:
    """Memory of every rank, with numbers of `value_bytes` bytes, but for the blocks' matrices where `quantize` (see
    `models.quantize`) has them in 8 bits.

    The text encoder lives on the head; the decoder on the head too, unless it has the last rank or one of its own.
    Caches, and what the decoder remembers, are of all sessions. A link has two slots at each of its ends, for the rows
    of a full forward.
    """
    last, found = load.stages - 1, []
    decoding = value_bytes * load.sessions * facts.decoder_memory_values
    home = {"last": last, "own-rank": load.stages}.get(layout.decode, 0)
    block_peak = facts.tokens * (2 * facts.width + max(4 * facts.width, facts.ffn_dim))
    for rank, (first, end) in enumerate(layout.blocks):
        count = end - first
        weights = facts.shared_values + count * facts.block_values
        saved = 0 if quantize == "none" else count * _saved(facts, value_bytes)
        weights += facts.embed_values + facts.text_values if rank == 0 else 0
        weights += facts.output_values if rank == last else 0
        weights += facts.decoder_values if rank == home else 0
        caches = load.sessions * facts.cache_values(count, steps=load.steps, kv_context=load.kv_context)
        received = facts.flow_values if rank == 0 else facts.hidden_values
        sent = facts.flow_values if rank == last else facts.hidden_values
        slots = 2 * (received + sent) if load.stages > 1 else 0
        activations = load.max_rows * (slots + block_peak)
        role = " ".join(
            word for word, here in (("head", rank == 0), ("output", rank == last), ("decode", rank == home)) if here
        )
        remembered = decoding if rank == home else 0
        sizes = value_bytes * weights - saved, value_bytes * caches, value_bytes * activations, remembered
        found.append(Memory(rank, role, *sizes))
    if home == load.stages:
        found.append(Memory(home, "decode", value_bytes * facts.decoder_values, 0, 0, decoding))
    return tuple(found)


def _saved(facts: Facts, value_bytes: int) -> int:
    """Bytes that 8 bits save in a block: a number of a matrix takes one, and every row five for its scale and zero."""
    return (value_bytes - 1) * facts.linear_values - 5 * facts.linear_rows
