"""Rules that lower how many rows share a forward: the first whose conditions are all met."""

from __future__ import annotations

import pytest

from streamdiff.config import BatchingConfig, BatchingRule, Config, ModelConfig
from streamdiff.pipeline.planner.batching import max_rows_of
from streamdiff.pipeline.planner.model_sizes import read_sizes, sizes_of

SIZES = sizes_of(ModelConfig(name="self-forcing"))
"""832x480 pixels; a row has 4,680 tokens, and takes 40,405 * 10^9 operations with its window full."""


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], 8),
        ([{"max_rows": 2}], 2),
        ([{"max_rows": 16}], 8),
        ([{"model": "self-*", "max_rows": 3}, {"max_rows": 2}], 3),
        ([{"model": "longlive-*", "max_rows": 3}, {"max_rows": 2}], 2),
        ([{"size": "480x832", "max_rows": 2}], 8),
        ([{"size": "832x480", "max_rows": 2}], 2),
        ([{"min_tokens": 4680, "max_rows": 5}], 5),
        ([{"min_tokens": 4681, "max_rows": 1}], 8),
        ([{"min_gflop": 40405.0, "max_rows": 4}], 4),
        ([{"min_gflop": 40405.5, "max_rows": 4}], 8),
        ([{"min_tokens": 1, "min_gflop": 90000.0, "max_rows": 1}], 8),
        ([{"max_rows": 1}], 1),
    ],
)
def test_the_first_rule_that_applies_lowers_what_is_configured(rules: list[dict[str, object]], expected: int) -> None:
    given = tuple(BatchingRule.model_validate(rule) for rule in rules)
    told = Config(batching=BatchingConfig(max_rows=8, rules=given))
    assert max_rows_of(told.served_model(), SIZES) == expected


def test_a_server_of_the_embedded_model_has_what_it_was_told() -> None:
    sizes = read_sizes("tiny")
    assert max_rows_of(Config().served_model(), sizes) == 1
    assert max_rows_of(ModelConfig(), sizes) == 1
    told = Config(batching=BatchingConfig(max_rows=4))
    assert max_rows_of(told.served_model(), sizes) == 4
    small = BatchingRule(model="tiny", size="256x256", min_tokens=192, max_rows=2)
    told = Config(batching=BatchingConfig(max_rows=4, rules=(small,)))
    assert max_rows_of(told.served_model(), sizes) == 2
