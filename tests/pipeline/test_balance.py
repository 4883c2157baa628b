"""The split that ranks agree on: measured, the same for all, with less for who has more to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep
from streamdiff.pipeline.balance import assign_blocks, gather_costs, measure, row_costs
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.planner.model_sizes import read_sizes
from streamdiff.pipeline.runner.graphs import Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.small import CPU, small_model


def agree(config: ModelConfig, everybody: list[dict[str, float]]) -> set[tuple[tuple[int, int], ...]]:
    """What the ranks come to, each in a thread of its own."""
    store, stages = dist.HashStore(), len(everybody)
    blocks = read_sizes(config.name).blocks

    def share(rank: int, own: dict[str, float]) -> tuple[tuple[int, int], ...]:
        return assign_blocks(config, blocks, gather_costs(RankContext(rank, stages, store), own, stages, 1, blocks))

    with ThreadPoolExecutor(stages) as pool:
        asked = [pool.submit(share, rank, own) for rank, own in enumerate(everybody)]
        return {each.result(timeout=240) for each in asked}


def test_a_head_that_decodes_gets_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk takes five forwards with `clean`, so a fifth of its decode counts."""
    busy = [{"block_s": 0.1, "decode_s": 1.0}, {"block_s": 0.11, "head_s": 0.01}]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert agree(ModelConfig(stages=2), [*busy]) == {((0, 2), (2, 6))}
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert agree(ModelConfig(stages=2), [*busy]) == {((0, 3), (3, 6))}, "a core is left for decoding"
    assert agree(ModelConfig(stages=2, decode_rank="last"), [*busy]) == {((0, 4), (4, 6))}
    assert agree(ModelConfig(stages=2, decode_rank="dedicated"), [*busy]) == {((0, 3), (3, 6))}


def test_a_disturbed_rank_does_not_count() -> None:
    """Blocks are alike: that one rank measured long does not make its blocks longer."""
    assert agree(ModelConfig(stages=2), [{"block_s": 0.1}, {"block_s": 7.0}]) == {((0, 3), (3, 6))}


@pytest.mark.parametrize("kv_context", ["clean", "staircase", "same_step"])
def test_measuring_takes_what_each_rank_does(kv_context: str) -> None:
    model = small_model()
    head = measure(model.part(0, 1), model.decoder, CPU, (0, 2), kv_context)
    last = measure(model.part(1, 2), None, CPU, (1, 2), kv_context)
    assert set(head) == {"block_s", "embed_s", "decode_s"} and set(last) == {"block_s", "head_s"}
    assert min(*head.values(), *last.values()) > 0


def test_what_rows_cost_is_measured_on_the_stage_itself_and_leaves_nothing_open() -> None:
    model = small_model(2)
    stage = ModelRunner(model, CPU)
    asked: list[int] = []
    forward = stage.forward

    def counting(rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        asked.append(len({row.session for row in rows}))
        return forward(rows, given)

    stage.forward = counting  # type: ignore[method-assign]
    costs = row_costs(stage, 6, steps=4, kv_context="clean", memory=RankMemory(10**12))
    assert len(costs) == 6 and costs == sorted(costs) and costs[0] > 0
    assert set(asked) == {1, 2, 4, 6} and not stage.sessions
    asked.clear()
    assert len(row_costs(stage, 6, steps=4, kv_context="same_step", memory=RankMemory(0))) == 6
    assert set(asked) == {1}, "there is room for no more"
