"""A ring of real processes holds no more memory, files, transfers or lists at its end than at its beginning.

Legs of ten chunks, and in `make soak` 10,000 chunks in legs of a hundred.
"""

from __future__ import annotations

import pytest

from tests.pipeline.growth_process import faults, grow

LIMIT_S = 6 * 3600.0


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "legs", "leg"), [(2, 12, 10), pytest.param(4, 100, 100, marks=pytest.mark.soak)])
def test_ranks_are_flat_while_prompts_change_and_sessions_come_and_go(stages: int, legs: int, leg: int) -> None:
    ranks = grow(stages, legs, leg, LIMIT_S)
    assert [len(found) for found in ranks] == [legs] * stages
    for rank, found in enumerate(ranks):
        assert not faults(found), f"rank {rank}"
    assert all(found[-1]["sessions"] >= 3 and found[-1]["tensors"] > 10 for found in ranks), "nothing was counted"
