"""What starts ranks for tests hears the one that fails, and leaves none behind."""

from __future__ import annotations

import uuid

import psutil
import pytest

from tests.pipeline.processes import RankFailed, run_ranks


def left(message: str) -> list[psutil.Process]:
    """Processes that were given this message."""
    return [process for process in psutil.process_iter(["cmdline"]) if message in (process.info["cmdline"] or [])]


@pytest.mark.parametrize("forked", [True, False])
def test_a_rank_that_fails_is_heard_while_the_others_wait_and_none_is_left(forked: bool) -> None:
    message = f"no luck {uuid.uuid4()}"
    with pytest.raises(RankFailed, match=rf"rank 1 of .*lost_rank ended with 1:(?s:.*)ValueError: {message}"):
        run_ranks("tests.pipeline.distributed.lost_rank", [message], 3, 600.0, forked=forked)
    assert not left(message)


def test_ranks_that_never_end_are_told_and_none_is_left() -> None:
    message = f"nothing {uuid.uuid4()}"
    with pytest.raises(RankFailed, match=r"rank 0 of .*lost_rank did not end within 0\.2 s"):
        run_ranks("tests.pipeline.distributed.lost_rank", [message], 1, 0.2)
    assert not left(message)
