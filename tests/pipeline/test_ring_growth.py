"""A ring of real processes holds no more memory, files, transfers or lists at its end than at its beginning.

1,000 chunks here; `python -m tests.pipeline.growth_process --chunks 10000` plays more.
"""

from __future__ import annotations

import pytest

from tests.pipeline.growth_process import LEG, SLACK, WARM_LEGS, Counts, faults, grow

CHUNKS, LIMIT_S = 1000, 3600.0


@pytest.mark.slow
def test_four_ranks_are_flat_while_prompts_change_and_sessions_come_and_go() -> None:
    ranks = grow(4, CHUNKS, LIMIT_S)
    assert [len(found) for found in ranks] == [CHUNKS // LEG] * 4
    for rank, found in enumerate(ranks):
        assert not faults(found), f"rank {rank}"
    assert all(found[-1]["sessions"] >= 3 and found[-1]["tensors"] > 10 for found in ranks), "nothing was counted"


@pytest.mark.parametrize("name", SLACK)
def test_whatever_grows_is_told(name: str) -> None:
    """Also what grew in between and went again; not what was there before the warm-up was over."""
    still: Counts = dict.fromkeys(SLACK, 1000)
    early = {**still, name: 10**9}
    assert not faults([early, *[still] * (WARM_LEGS - 1), *[{**still, name: 1000 + SLACK[name]}] * 3])
    grown = {**still, name: 1001 + SLACK[name]}
    assert faults([*[still] * WARM_LEGS, grown, still]) == [f"{name}: 1000 after 500 chunks, {grown[name]} later"]
