"""What starts ranks for tests hears the one that fails, and leaves none behind."""

from __future__ import annotations

import psutil
import pytest

from tests.pipeline.processes import RankFailed, run_ranks


def left() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tests.pipeline.distributed.lost_rank" in child.cmdline()]


def test_a_rank_that_fails_is_heard_while_the_others_wait_and_none_is_left() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of .*lost_rank ended with 1:(?s:.*)ValueError: no luck"):
        run_ranks("tests.pipeline.distributed.lost_rank", ["no luck"], 3, 600.0)
    assert not left()


def test_ranks_that_never_end_are_told_and_none_is_left() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 of .*lost_rank did not end within 0\.2 s"):
        run_ranks("tests.pipeline.distributed.lost_rank", [""], 1, 0.2)
    assert not left()
