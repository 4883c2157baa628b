"""What is measured before the first chunk."""

from __future__ import annotations

from collections.abc import Sequence

from streamdiff.core import MicroStep
from streamdiff.pipeline.build import row_costs
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.runner.graphs import Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.small import CPU, small_model


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
