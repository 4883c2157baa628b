"""How many rows may share a forward of a model: the configuration's numbers, lowered by the first rule that applies."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from streamdiff.config import BatchingConfig, BatchingRule, ModelConfig, ServedModel
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.planner.costs import row_gflop
from streamdiff.pipeline.planner.model_sizes import ModelSizes


class Batching(NamedTuple):
    """Most rows of a forward, and the seconds for which a row that is ready may wait for others."""

    max_rows: int = 1
    wait_s: float = 0.0


ALONE = Batching()
"""Every row has a forward of its own."""


@dataclass(frozen=True)
class RowFacts:
    """What rules ask for: the model's name, its picture's size as WIDTHxHEIGHT, tokens of a row, and 10^9 operations of
    a row in all blocks."""

    model: str
    size: str
    tokens: int
    gflop: float


def batching_of(config: ModelConfig, sizes: ModelSizes) -> Batching:
    """That of a configuration and its model, the same on all ranks; only a server's sessions share forwards."""
    if not isinstance(config, ServedModel):
        return ALONE
    spec, cost = sizes.spec, row_gflop(sizes, config.kv_context)
    return resolve(config.batching, RowFacts(spec.name, f"{spec.width}x{spec.height}", sizes.tokens, cost))


def rows_carried(spec: ModelSpec, max_rows: int, clean_with_next: bool) -> int:
    """Most rows of a forward, which the ring's links must be able to carry."""
    return max(max_rows, 2 if clean_with_next else 1, spec.first_chunks)


def resolve(config: BatchingConfig, row: RowFacts) -> Batching:
    """What holds for a model: with mode `off` no row shares a forward; a rule can lower what is configured, not raise
    it."""
    if config.mode == "off":
        return ALONE
    max_rows, wait_ms = config.most_rows, config.wait_ms
    rule = next((rule for rule in config.rules if _applies(rule, row)), None)
    if rule is not None and rule.max_rows is not None:
        max_rows = min(max_rows, rule.max_rows)
    if rule is not None and rule.wait_ms is not None:
        wait_ms = min(wait_ms, rule.wait_ms)
    return Batching(max_rows, wait_ms / 1000 if max_rows > 1 else 0.0)


def _applies(rule: BatchingRule, row: RowFacts) -> bool:
    """Whether all conditions that a rule has are met."""
    return (
        (rule.model is None or fnmatchcase(row.model, rule.model))
        and (rule.size is None or rule.size == row.size)
        and (rule.min_tokens is None or row.tokens >= rule.min_tokens)
        and (rule.min_gflop is None or row.gflop >= rule.min_gflop)
    )
