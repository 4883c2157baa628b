"""What starts ranks for tests hears the one that fails, and leaves none behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.pipeline.processes import RankFailed, run_ranks

LOST = "tests.pipeline.distributed.lost_rank"


def left(folder: Path) -> list[int]:
    """Which of the ranks that wrote into the folder there are still."""
    return [int(file.name) for file in folder.iterdir() if psutil.pid_exists(int(file.read_text() or -1))]


@pytest.mark.slow
@pytest.mark.parametrize("forked", [True, False])
def test_a_rank_that_fails_is_heard_while_the_others_wait_and_none_is_left(forked: bool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of .*lost_rank ended with 1:(?s:.*)ValueError: no luck"):
        run_ranks(LOST, ["no luck", str(tmp_path)], 3, 600.0, forked=forked)
    assert (tmp_path / "1").exists() and not left(tmp_path)


def test_ranks_that_never_end_are_told_and_none_is_left(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 of .*lost_rank did not end within 0\.2 s"):
        run_ranks(LOST, ["nothing", str(tmp_path)], 1, 0.2)
    assert not left(tmp_path)
