"""What a block costs, counted on tensors without memory at Wan 1.3B's sizes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from benchmarks import kernel_count
from benchmarks.kernel_count import CONTEXTS, micro_step, per_block, row, spec_of
from benchmarks.operation_counter import Counter

TELLING = {("self-forcing", "clean"), ("self-forcing", "staircase"), ("longlive-1.3b", "same_step")}
"""One for each way to see the past, and one with a sink."""
OPERATIONS, ACTIVATIONS = 30, 70
"""Of a block, at most. A staircase's window lies in two pieces for most chunks, whose results are put together; a sink
that moves does so with each chunk, and in `same_step` each step has a cache of its own."""


def test_kernels_bytes_and_reads_of_a_cache_are_counted() -> None:
    cache, small = torch.zeros(8, 4), torch.zeros(1, 4)
    with Counter([cache]) as counter:
        x = cache[2:4].transpose(0, 1)  # a view starts nothing
        y = torch.cat([x, x])  # 2 * 32 read, 64 written
        y.mul_(small.expand(8, 4)[:, :2])  # 64 + 8 read, 64 written
        torch.mm(y, y.T)  # a matrix product moves what it must
        cache[0].copy_(small[0])  # 16 read, 16 written
    count = counter.count
    assert (count.operations, count.matrix, count.copied_bytes) == (4, 1, 64)
    assert count.moved_bytes == 128 + 136 + 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kv_context"),
    [
        case if case in TELLING else pytest.param(*case, marks=pytest.mark.soak)
        for case in product(kernel_count.MODELS, CONTEXTS)
    ],
)
def test_a_block_is_few_kernels_that_move_few_bytes(model: str, kv_context: str) -> None:
    spec = spec_of(model)
    block = per_block(lambda blocks: micro_step(spec, kv_context, blocks))
    found = row(model, kv_context, block, spec)
    assert found["matrix"] == 6
    assert found["copied_bytes"] == 0
    assert found["operations"] <= OPERATIONS
    assert found["activations"] <= ACTIVATIONS
    assert found["attention"] == (3 if kv_context == "staircase" else 2)
