"""Blocks per stage are split as well as can be, the same for whoever asks; decode goes where it costs least; and rules
lower how many rows share a forward."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.config import BatchingConfig, BatchingRule, Config, ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.costs import Costs, in_proportion
from streamdiff.pipeline.planner.model_sizes import read_sizes, sizes_of
from streamdiff.pipeline.planner.partition import Workload, choose_layout, max_rows_of, split_blocks, split_evenly

SIZES = sizes_of(ModelConfig(name="self-forcing"))
"""832x480 pixels; a row has 4,680 tokens, and takes 40,405 * 10^9 operations with its window full."""


def slowest(ends: tuple[int, ...], block_s: list[float], extra_s: list[float]) -> float:
    return max(sum(block_s[a:b]) + extra for (a, b), extra in zip(pairwise(ends), extra_s, strict=True))


@given(st.data())
def test_no_other_split_is_faster(data: st.DataObject) -> None:
    block_s = [n / 8 for n in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))]
    ranks = data.draw(st.integers(1, len(block_s)))
    extra_s = [n / 8 for n in data.draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks))]
    blocks = len(block_s)
    every = [(0, *inner, blocks) for inner in combinations(range(1, blocks), ranks - 1)]
    split = split_blocks(block_s, extra_s)
    ends = (0, *(last for _, last in split))
    assert ends in every, "contiguous, all blocks, none empty"
    assert [first for first, _ in split] == list(ends[:-1])
    best = min(slowest(other, block_s, extra_s) for other in every)
    assert slowest(ends, block_s, extra_s) == best

    def unevenness(ends: tuple[int, ...]) -> float:
        return sum((sum(block_s[a:b]) + x) ** 2 for (a, b), x in zip(pairwise(ends), extra_s, strict=True))

    fastest = [other for other in every if slowest(other, block_s, extra_s) == best]
    even = min(unevenness(other) for other in fastest)
    assert ends == max(other for other in fastest if unevenness(other) == even), "the first ranks have more blocks"


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_equal_blocks_are_split_as_even_as_can_be_the_longer_runs_first(blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    runs = split_evenly(blocks, stages)
    short, more = divmod(blocks, stages)
    assert [last - first for first, last in runs] == [short + 1] * more + [short] * (stages - more)
    assert [first for first, _ in runs] == [0, *(last for _, last in runs[:-1])] and runs[-1][1] == blocks
    assert runs == split_blocks([1.0] * blocks, [0.0] * stages)


@pytest.mark.parametrize("stages", [0, 5, -1])
def test_a_stage_without_a_block_is_refused(stages: int) -> None:
    with pytest.raises(ConfigError) as error:
        split_evenly(4, stages)
    assert error.value.field == "model.stages"


def costs(blocks: int, *, embed: float = 0.0, head: float = 0.0, decode: float = 0.0) -> Costs:
    """Blocks of 1 s, for up to three rows in proportion."""
    parts = (in_proportion(time_s, 3) for time_s in (embed, head))
    return Costs("", (in_proportion(1.0, 3),) * blocks, *parts, decode, 0.0, 0.0)


def test_decode_goes_where_it_costs_least_and_blocks_make_room_for_it() -> None:
    """12 blocks, 4 ranks, a decode of 8 s once in 4 forwards: 2 s per forward, as much as two blocks."""
    load = Workload(4, 1, 4, "same_step", 1)
    busy_head = choose_layout(costs(12, embed=2.0, decode=8.0), load)
    assert (busy_head.decode, busy_head.slowest_s(load)) == ("last", 4.0)
    busy_last = choose_layout(costs(12, head=2.0, decode=8.0), load)
    assert (busy_last.decode, busy_last.decode_stage, busy_last.slowest_s(load)) == ("head", 0, 4.0)
    alone = choose_layout(costs(12, decode=8.0), load, "dedicated")
    assert (alone.decode_stage, alone.slowest_s(load)) == (None, 3.0)
    assert alone.blocks == ((0, 3), (3, 6), (6, 9), (9, 12))
    on_last = choose_layout(costs(10, decode=8.0), load, "last")
    assert [last - first for first, last in on_last.blocks] == [3, 3, 3, 1]
    assert on_last.stage_s[3] == (1.0, 2.0, 3.0), "decode is no part of the stage's forward"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], 8),
        ([{"max_rows": 2}], 2),
        ([{"model": "longlive-*", "max_rows": 3}, {"max_rows": 2}], 2),
        ([{"size": "480x832", "max_rows": 2}], 8),
        ([{"size": "832x480", "max_rows": 2}], 2),
        ([{"min_tokens": 4680, "max_rows": 5}], 5),
        ([{"min_tokens": 4681, "max_rows": 1}], 8),
        ([{"min_gflop": 40405.0, "max_rows": 4}], 4),
        ([{"min_gflop": 40405.5, "max_rows": 4}], 8),
        ([{"min_tokens": 1, "min_gflop": 90000.0, "max_rows": 1}], 8),
    ],
)
def test_the_first_rule_that_applies_lowers_what_is_configured(rules: list[dict[str, object]], expected: int) -> None:
    given = tuple(BatchingRule.model_validate(rule) for rule in rules)
    told = Config(batching=BatchingConfig(max_rows=8, rules=given))
    assert max_rows_of(told.served_model(), SIZES) == expected


def test_only_a_server_that_is_told_so_shares_forwards() -> None:
    sizes = read_sizes("tiny")
    assert max_rows_of(Config().served_model(), sizes) == max_rows_of(ModelConfig(), sizes) == 1
    told = Config(batching=BatchingConfig(max_rows=4))
    assert max_rows_of(told.served_model(), sizes) == 4
