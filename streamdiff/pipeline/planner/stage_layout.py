"""Stage layout: blocks per stage and where decoding runs, chosen from costs before the first chunk and never changed.

Pure: costs in, a layout out. No torch, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamdiff.core import PER_STEP
from streamdiff.pipeline.planner.costs import Costs
from streamdiff.pipeline.planner.partition import split_blocks

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


@dataclass(frozen=True)
class Layout:
    """`blocks[p]` is (first, last), last exclusive, of stage p; `stage_s[p][r - 1]` its seconds for r rows.

    `decode` is one of `PLACES`; `slowest_s` is what the slowest
    rank needs per full forward, its share of decoding included.
    """

    blocks: Blocks
    stage_s: tuple[tuple[float, ...], ...]
    decode: str
    slowest_s: float


def decode_stage(place: str, stages: int) -> int | None:
    """The stage that decoding at `place` keeps busy; None where it runs beside the stages."""
    return {"head": 0, "last": stages - 1}.get(place)


def choose_layout(costs: Costs, load: Workload, decode: str = "auto") -> Layout:
    """The fastest split of blocks; for `auto` also decode's place: rank 0 or the last rank, whichever is faster.

    Times are compared for full forwards. A chunk's decode counts with its share of one forward: it comes once in so
    many forwards as the chunk has passes, per row.

    Raises:
        ConfigError: more stages than blocks.
    """
    return fastest(decode, lambda place: _layout_with(costs, load, place))


def fastest(decode: str, layout: Callable[[str], Layout]) -> Layout:
    """The layout with decoding at the place `decode`, or for `auto` at the better of two."""
    return min(map(layout, ("head", "last") if decode == "auto" else (decode,)), key=lambda each: each.slowest_s)


def layout_of(
    blocks: Blocks, stage_s: Sequence[tuple[float, ...]], decode: str, load: Workload, decode_s: float
) -> Layout:
    """The layout of stages whose blocks and seconds are known, with a chunk decoded in `decode_s`."""
    share = _decode_share(decode, load, decode_s)
    slowest = max(times[load.max_rows - 1] + extra for times, extra in zip(stage_s, share, strict=True))
    return Layout(blocks, tuple(stage_s), decode, slowest)


def _layout_with(costs: Costs, load: Workload, decode: str) -> Layout:
    full, last = load.max_rows - 1, load.stages - 1
    extra = _decode_share(decode, load, costs.decode_s)
    extra[0] += costs.embed_s[full]
    extra[last] += costs.head_s[full]
    blocks = split_blocks([times[full] for times in costs.block_s], extra)
    stage_s = []
    for rank, (first, end) in enumerate(blocks):
        parts = [*costs.block_s[first:end]]
        parts += [costs.embed_s] if rank == 0 else []
        parts += [costs.head_s] if rank == last else []
        stage_s.append(tuple(math.fsum(times) for times in zip(*parts, strict=True)))
    return layout_of(blocks, stage_s, decode, load, costs.decode_s)


def _decode_share(decode: str, load: Workload, decode_s: float) -> list[float]:
    """Seconds that decoding takes of each stage per full forward."""
    share, place = decode_s * load.max_rows / load.passes, decode_stage(decode, load.stages)
    return [share if rank == place else 0.0 for rank in range(load.stages)]
