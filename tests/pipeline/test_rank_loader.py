"""What a rank loads by its configuration, as far as that is decided here."""

from __future__ import annotations

import pytest
import torch

from streamdiff.config import ModelConfig
from streamdiff.pipeline import rank_loader
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches
from tests.small import CPU


@pytest.mark.parametrize(
    ("kv_context", "stages", "sessions"),
    [("clean", 1, 1), ("clean", 4, 4), ("staircase", 4, 1), ("matched", 4, 1)],
)
def test_caches_wait_for_as_many_sessions_as_keep_a_ring_of_gpus_busy(
    kv_context: str, stages: int, sessions: int
) -> None:
    config = ModelConfig(compile="on", kv_context=kv_context, stages=stages)  # type: ignore[arg-type]
    assert rank_loader.waiting(config, torch.device("cuda")) == PreallocatedCaches(sessions, 4, kv_context)
    assert rank_loader.waiting(config, CPU) == PreallocatedCaches(1, 4, kv_context), "on a CPU nothing is bound to them"
    assert rank_loader.waiting(config.model_copy(update={"compile": "off"}), torch.device("cuda")) is None
