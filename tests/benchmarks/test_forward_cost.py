"""The formula of a forward against torch's own count, and the floor of hand-made parts."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import throughput_model
from benchmarks.forward_cost import Ceilings, Part, forward
from streamdiff.models.model import Model
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.output import ModelInfo
from streamdiff.pipeline.planner.model_sizes import ModelSizes, sizes_from
from tests.small import CPU, small_model


def sizes_of(model: Model) -> ModelSizes:
    config: Any = model.denoiser.model.config
    return sizes_from(dict(config), model.spec)


def counted(model: Model, kv_context: str) -> int:
    """Operations of one denoise step, window full, as torch counts them. Plain attention: torch counts no other on a
    CPU."""
    model.denoiser.attention = "math"
    ring = RingExecutor(model, CPU)
    ring.open(0, torch.zeros(model.spec.text_shape), epoch=0, steps=2, kv_context=kv_context)
    while True:
        ring.scheduler.set_frame_credit(0, 10**6)
        with FlopCounterMode(display=False) as counter:
            rows, _ = ring.turn()
        if rows and rows[0].step == 1 and rows[0].chunk > model.spec.window_chunks(kv_context):
            return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "matched", "staircase"])
@pytest.mark.parametrize("sizes", [{}, {"layers": 3, "heads": 3, "chunk": 1, "window": 4, "sink": 1, "planes": 0}])
def test_torch_counts_as_many_operations(kv_context: str, sizes: dict[str, int]) -> None:
    model = small_model(**sizes)
    assert sum(part.flops for part in forward(sizes_of(model), kv_context)) == counted(model, kv_context)


def test_weights_are_read_once() -> None:
    """With a chunk's and the cache's numbers taken off, what is left is what is stored."""
    model = small_model(layers=3, heads=3)
    sizes = sizes_of(model)
    stored = sum(weight.numel() for weight in model.denoiser.model.parameters())
    text = sizes.text_dim * sizes.width + sizes.width + sizes.width**2 + sizes.width  # once per prompt
    text += sizes.blocks * (2 * (sizes.width**2 + sizes.width) + sizes.width)  # its keys and values
    time = sizes.freq_dim * sizes.width + sizes.width**2 + 2 * sizes.width  # once per session
    small = sizes.blocks * 8 * sizes.width  # modulation tables and the norm before cross-attention
    planes = (sizes.in_channels - sizes.out_channels) * prod(sizes.patch) * sizes.width  # folded
    values = sum(part.values for part in forward(sizes, "clean"))
    half = sum(part.values for part in forward(small_tokens(sizes), "clean"))
    weights = 2 * half - values  # numbers that do not double with the chunk
    frames = 7 * sizes.width
    expected = stored - text - time - small - planes + extra(sizes)
    assert weights == pytest.approx(expected, abs=2 * frames * sizes.spec.chunk_latents)


def extra(sizes: ModelSizes) -> int:
    """What does not grow with a chunk beside the weights: the text's keys and values."""
    return sizes.blocks * 2 * sizes.text_tokens * sizes.width


def small_tokens(sizes: ModelSizes) -> ModelSizes:
    """The same model with half the tokens in a chunk."""
    return replace(sizes, spec=replace(sizes.spec, latent_height=sizes.spec.latent_height // 2))


def test_a_part_takes_as_long_as_its_slower_side() -> None:
    ceilings = Ceilings(flops_per_s=100.0, bytes_per_s=10.0)
    assert Part("a", 200.0, 1.0).floor_s(ceilings, 2) == 2.0
    assert Part("b", 200.0, 50.0).floor_s(ceilings, 2) == 10.0


def test_floor_and_share_of_hand_made_parts() -> None:
    parts = [Part("a", 200.0, 1.0), Part("b", 200.0, 50.0)]
    info = ModelInfo("small", "cpu", 8, 8, 16.0, chunk_frames=12, steps=4, kv_context="clean")
    found = throughput_model.judged(parts, Ceilings(100.0, 10.0), 2, 24.0, info)
    assert found["figures"]["floor_s"] == 12.0 and found["figures"]["share"] == 0.5
    assert [row["set by"] for row in found["parts"]] == ["matrix", "copy"]
    assert found["fps_at_the_floor"] == pytest.approx(12 / (5 * 12.0))
    assert found["fps_as_measured"] == pytest.approx(12 / (5 * 24.0))
