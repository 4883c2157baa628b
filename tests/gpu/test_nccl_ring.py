"""The NCCL link where there is hardware for it; skipped with the reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.nccl_ring import check_same, play, refused
from tests.pipeline.distributed.scenarios import SCENARIOS


def skip_where_it_cannot_run(ranks: int) -> None:
    reason = refused(ranks)
    if reason:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_edges_connect_whoever_comes_late(stages: int, tmp_path: Path) -> None:
    skip_where_it_cannot_run(stages)
    assert play("connect", stages, tmp_path).count("connected 20 times") == stages


@pytest.mark.gpu
def test_the_contract_of_links(tmp_path: Path) -> None:
    skip_where_it_cannot_run(2)
    said = play("links", 2, tmp_path)
    for name in SCENARIOS:
        assert f"{name} passed" in said


@pytest.mark.gpu
def test_the_host_never_waits_for_the_device(tmp_path: Path) -> None:
    skip_where_it_cannot_run(2)
    assert "messages of 16 MiB" in play("steady", 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 4])
def test_a_ring_makes_what_one_stage_makes(stages: int, tmp_path: Path) -> None:
    skip_where_it_cannot_run(stages)
    check_same(play("ring", stages, tmp_path))
