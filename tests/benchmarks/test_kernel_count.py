"""What a block costs, counted on tensors without memory at Wan 1.3B's sizes. The planner's formula of a forward against
torch's own count."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import fps_ttff, kernel_count, throughput_model
from benchmarks.kernel_count import CONTEXTS, micro_step, per_block, row, spec_of
from benchmarks.operation_counter import Counter
from benchmarks.report import ROOT
from streamdiff.pipeline.planner.costs import row_gflop
from streamdiff.pipeline.planner.model_sizes import sizes_from
from streamdiff.pipeline.ring import Ring
from tests.small import CPU, small_model

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


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "same_step", "staircase"])
def test_torch_counts_as_many_operations(kv_context: str) -> None:
    """Of a denoise step, window full, with plain attention: torch counts no other on a CPU. Beside the blocks there are
    embedding and output layer (position planes are folded into the bias), and the modulation of each latent frame."""
    model = small_model(layers=3, heads=3, chunk=1, window=4, sink=1, planes=0)
    config: Any = model.denoiser.model.config
    sizes = sizes_from(dict(config), model.spec)
    model.denoiser.attention = "math"
    ring = Ring(model, CPU)
    ring.open(0, torch.zeros(model.spec.text_shape), epoch=0, steps=2, kv_context=kv_context)
    rows: Any = []
    while not (rows and rows[0].step == 1 and rows[0].chunk > model.spec.window_chunks(kv_context)):
        ring.scheduler.set_frame_credit(0, 10**6)
        with FlopCounterMode(display=False) as counter:
            rows, _ = ring.step_latents()
    ends = 4 * sizes.tokens * sizes.width * sizes.out_channels * prod(sizes.patch)
    modulation = 12 * sizes.spec.chunk_latents // sizes.patch[0] * sizes.width**2
    assert counter.get_total_flops() == round(1e9 * row_gflop(sizes, kv_context)) + ends + modulation


@pytest.mark.slow
def test_share_and_rates_follow_from_floor_and_forward(tmp_path: Path) -> None:
    out = tmp_path / "floor.json"
    words = ["--kv-context", "clean", "--steps", "2", "--rounds", "1", "--device", "cpu", "--out", str(out)]
    assert throughput_model.main(words) == fps_ttff.OK
    (found,) = json.loads(out.read_text())["results"].values()
    figures = found["figures"]
    steps = [value for name, values in found["raw"].items() if name.startswith("step") for value in values]
    assert figures["forward_s"] == median(steps) and figures["share"] == figures["floor_s"] / figures["forward_s"]
    assert figures["floor_s"] > 0 and found["forwards_per_chunk"] == 3
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert not [name for name in {*found} - {"figures", "raw"} if f"| `{name}` | " not in readme]
