"""The NCCL link where there is hardware for it; skipped with the reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.nccl_ring import KV_CONTEXTS, check_same, finding, play, refusal, refused
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


def test_a_ring_that_makes_something_else_is_noticed() -> None:
    right = {kv_context: finding(kv_context, True, 0.0) for kv_context in KV_CONTEXTS}
    check_same("\n".join(["rank 0:", *right.values(), "rank 1:"]))
    for kv_context in KV_CONTEXTS:
        for line in (finding(kv_context, False, 1e-6), finding(kv_context, False, float("nan")), ""):
            with pytest.raises(AssertionError, match=kv_context):
                check_same("\n".join({**right, kv_context: line}.values()))


@pytest.mark.parametrize(
    ("stages", "devices", "version", "reason"),
    [
        (2, 0, None, "no CUDA device"),
        (2, 1, None, "no NCCL"),
        (2, 1, (2, 29, 7), "2 ranks on 1 GPU need NCCL 2.30 or newer, loaded is 2.29.7"),
        (4, 2, (2, 28, 9), "4 ranks on 2 GPU need"),
        (2, 1, (2, 30, 3), None),
        (2, 2, (2, 28, 9), None),
        (4, 8, (2, 26, 2), None),
    ],
)
def test_what_a_ring_over_nccl_needs(
    stages: int, devices: int, version: tuple[int, int, int] | None, reason: str | None
) -> None:
    said = refusal(stages, devices, version)
    assert (said is None) == (reason is None)
    assert reason is None or reason in said
