"""How many rows may share a forward of a model: the configuration's number, lowered by the first rule that applies."""

from __future__ import annotations

from fnmatch import fnmatchcase

from streamdiff.config import BatchingRule, ModelConfig, ServedModel
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.planner.costs import row_gflop
from streamdiff.pipeline.planner.model_sizes import ModelSizes


def max_rows_of(config: ModelConfig, sizes: ModelSizes) -> int:
    """Most rows of a forward of a configuration and its model, the same on all ranks. Only a server's sessions share
    forwards; a rule can lower what is configured, not raise it."""
    if not isinstance(config, ServedModel):
        return 1
    rule = next((rule for rule in config.batching.rules if _applies(rule, sizes, config.kv_context)), None)
    lowered = None if rule is None else rule.max_rows
    return config.batching.max_rows if lowered is None else min(config.batching.max_rows, lowered)


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
