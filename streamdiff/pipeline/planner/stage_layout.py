"""Blocks per stage, the place of decode, memory per rank: decided from costs before the first chunk, never moved after.

Pure: costs and sizes in, a plan out. No torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamdiff.pipeline.planner.costs import Costs, total
from streamdiff.pipeline.planner.partition import check_stages, split_blocks

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
