"""Rings of processes over a CPU stand-in for NCCL start, stream, pause and end, and nobody waits for ever.

What gloo lets pass locks here: the first use of an edge waits for the other host, a send for its receive.
"""

from __future__ import annotations

import pytest

from tests.pipeline.distributed.rendezvous_ring import CHUNKS
from tests.pipeline.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rings over a transport like NCCL")]
LIMIT_S = 900.0  # ends what hangs; a busy machine takes minutes


RINGS = [3, *(pytest.param(stages, marks=pytest.mark.soak) for stages in (2, 4))]


@pytest.fixture(scope="module", params=RINGS)
def said(request: pytest.FixtureRequest) -> list[list[str]]:
    """What each rank of a ring of so many printed, by line."""
    lines = run_ranks("tests.pipeline.distributed.rendezvous_ring", [], request.param, LIMIT_S)
    return [text.splitlines() for text in lines]


def test_all_ranks_sending_first_or_receiving_first_lock(said: list[list[str]]) -> None:
    for rank, lines in enumerate(said):
        locked = [line for line in lines if line.startswith("locked: each waits for the next: ")]
        assert len(locked) == 2
        for line, role in zip(locked, ("send", "receive"), strict=True):
            assert line.count(f": {role} of rank ") == len(said), f"rank {rank}: all of them, around: {line}"


def test_edges_connect_whoever_comes_late(said: list[list[str]]) -> None:
    assert [lines[0] for lines in said] == ["connected 4 times"] * len(said)


def test_the_ring_streams_what_one_stage_streams(said: list[list[str]]) -> None:
    """Whether sends end early or when they are matched; through pauses, new prompts and a second session."""
    expected = [f"capacity {each}: [{n}, {n // 2}] chunks, same [True, True]" for each, n in CHUNKS.items()]
    assert [line for line in said[0] if line.startswith("capacity")] == expected


def test_all_others_end_when_a_rank_dies(said: list[list[str]]) -> None:
    """Nothing of NCCL says it; the records do."""
    for rank, lines in enumerate(said[:-1]):
        assert lines[-1].startswith("ended: the link with rank "), f"rank {rank}: {lines[-1]}"
    assert not said[-1][-1].startswith("ended")
