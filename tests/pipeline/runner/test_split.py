"""Blocks per stage: the split is the best there is, and the same for whoever asks."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.partition import split_blocks, split_evenly


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


def test_the_slowest_rank_counts_before_evenness() -> None:
    """(3, 7, 2) is more even by its squares than (5, 6, 1), but its slowest rank is slower."""
    assert split_blocks([3.0, 2.0, 1.0, 1.0], [0.0, 5.0, 0.0]) == ((0, 2), (2, 3), (3, 4))


def test_forty_blocks_over_eight_ranks_make_way_for_what_else_a_rank_does() -> None:
    assert split_blocks([1.0] * 40, [0.0] * 8) == tuple((5 * n, 5 * n + 5) for n in range(8))
    extra_s = [3.0, *[0.0] * 6, 4.5]
    counts = [last - first for first, last in split_blocks([1.0] * 40, extra_s)]
    assert (counts[0], counts[-1], sum(counts)) == (3, 1, 40)
    assert sorted(counts[1:-1]) == [6] * 6


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_equal_blocks_are_split_as_even_as_can_be_the_longer_runs_first(blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    runs = split_evenly(blocks, stages)
    short, more = divmod(blocks, stages)
    assert [last - first for first, last in runs] == [short + 1] * more + [short] * (stages - more)
    assert [first for first, _ in runs] == [0, *(last for _, last in runs[:-1])] and runs[-1][1] == blocks


@pytest.mark.parametrize("block_s", [[1.0, -0.5], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_times_that_cannot_be_are_refused(block_s: list[float]) -> None:
    with pytest.raises(ConfigError, match="must be 0 or more"):
        split_blocks(block_s, [0.0])


@pytest.mark.parametrize("stages", [0, 5, -1])
def test_a_stage_without_a_block_is_refused(stages: int) -> None:
    with pytest.raises(ConfigError, match=f"stages is {stages}, but must be 1 to 4: every stage needs a block"):
        split_evenly(4, stages)
