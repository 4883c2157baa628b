"""A run from end to end, and the planner's formula of a forward against torch's own count."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import fps_ttff, throughput_model
from benchmarks.report import ROOT
from streamdiff.pipeline.planner.costs import row_gflop
from streamdiff.pipeline.planner.model_sizes import sizes_from
from streamdiff.pipeline.ring import Ring
from tests.small import CPU, small_model


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
