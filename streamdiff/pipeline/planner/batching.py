"""How many rows may share a forward of a model: the configuration's numbers, lowered by the first rule that applies."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from streamdiff.config import BatchingRule, ModelConfig, ServedModel
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.planner.costs import row_gflop
from streamdiff.pipeline.planner.model_sizes import ModelSizes


class Batching(NamedTuple):
    """Most rows of a forward, and the seconds for which a row that is ready may wait for others."""

    max_rows: int = 1
    wait_s: float = 0.0


ALONE = Batching()
"""Every row has a forward of its own."""


def batching_of(config: ModelConfig, sizes: ModelSizes) -> Batching:
    """That of a configuration and its model, the same on all ranks. Only a server's sessions share forwards, and with
    mode `off` none do; a rule can lower what is configured, not raise it."""
    if not isinstance(config, ServedModel) or config.batching.mode == "off":
        return ALONE
    max_rows, wait_ms = config.batching.most_rows, config.batching.wait_ms
    rule = next((rule for rule in config.batching.rules if _applies(rule, sizes, config.kv_context)), None)
    if rule is not None and rule.max_rows is not None:
        max_rows = min(max_rows, rule.max_rows)
    if rule is not None and rule.wait_ms is not None:
        wait_ms = min(wait_ms, rule.wait_ms)
    return Batching(max_rows, wait_ms / 1000 if max_rows > 1 else 0.0)


def rows_carried(spec: ModelSpec, max_rows: int) -> int:
    """Most rows of a forward, which the ring's links must be able to carry."""
    return max(max_rows, spec.first_chunks)


def _applies(rule: BatchingRule, sizes: ModelSizes, kv_context: str) -> bool:
    """Whether all conditions that a rule has are met by a row of the model in this KV context."""
    spec = sizes.spec
    return (
        (rule.model is None or fnmatchcase(spec.name, rule.model))
        and (rule.size is None or rule.size == f"{spec.width}x{spec.height}")
        and (rule.min_tokens is None or sizes.tokens >= rule.min_tokens)
        and (rule.min_gflop is None or row_gflop(sizes, kv_context) >= rule.min_gflop)
    )
