"""What LoRAs that a session loads cost in a forward: rows with 0, 1 and 2 of rank 32, in turns in one process.

The transformer has random weights; its forwards have a full window. With compiled graphs (CUDA) the ratio to a graph
is larger, as rows with LoRAs run the plain path; here both do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from streamdiff import clock
from streamdiff.core import MicroStep
from streamdiff.models.model import StageModel
from streamdiff.models.spec import ModelSpec
from streamdiff.models.transformer.lora import LAYERS, Factors
from streamdiff.models.transformer.wan import WanDenoiser, make_transformer
from streamdiff.pipeline.runner.model_runner import ModelRunner

STEPS, LATENT = 4, (16, 3, 32, 32)
MODELS = {"256 wide, 4 blocks": (4, 4), "768 wide, 6 blocks": (12, 6)}


def stage_of(heads: int, blocks: int) -> ModelRunner:
    """A stage of a random model with heads of 64 channels."""
    torch.manual_seed(0)
    width, (channels, frames, height, columns) = heads * 64, LATENT
    sizes = {"num_attention_heads": heads, "attention_head_dim": 64, "num_layers": blocks, "ffn_dim": 4 * width}
    sizes |= {"in_channels": channels, "out_channels": channels, "text_dim": 512, "freq_dim": 256}
    model = make_transformer({**sizes, "cross_attn_norm": True}).eval().requires_grad_(False)
    spec = ModelSpec(
        name="random", latent_channels=channels, latent_height=height, latent_width=columns, chunk_latents=frames,
        window_latents=3 * frames, sink_latents=0, frames_per_latent=4, width=8 * columns, height=8 * height,
        native_fps=16.0, shift=5.0, steps=(STEPS,), text_shape=(64, 512),
    )  # fmt: skip
    return ModelRunner(StageModel(spec, WanDenoiser(model).fuse()), torch.device("cpu"))


def measure(stage: ModelRunner, rank: int, rounds: int) -> dict[str, Any]:
    """Seconds of a forward of one row by its number of LoRAs, and the median of each round's ratio to none."""
    for lora in (1, 2):
        stage.loras[lora] = []
        for block in stage.denoiser.blocks:
            shapes = {layer: block.get_parameter(f"{layer}.weight").shape for layer in LAYERS}
            pairs = {
                layer: Factors(torch.randn(rank, inputs), torch.randn(outputs, rank) / 1000)
                for layer, (outputs, inputs) in shapes.items()
            }
            stage.loras[lora].append(pairs)
    rows = []
    for count in range(3):
        stage.open(count, steps=STEPS, kv_context="clean")
        stage.set_text(count, 0, torch.randn(stage.spec.text_shape), 0, 0, dict.fromkeys(range(1, count + 1), 1.0))
        rows.append(MicroStep(count, 3, 0, STEPS, 0))
    spent: list[list[float]] = []
    given = stage.zeros(1)
    for _ in range(1 + rounds):  # the first does not count
        spent.append([])
        for row in rows:
            begun_s = clock.monotonic_s()
            stage.forward([row], given)
            spent[-1].append(clock.monotonic_s() - begun_s)
    ratios = [statistics.median(each[count] / each[0] for each in spent[1:]) for count in range(3)]
    fastest = [min(each[count] for each in spent[1:]) for count in range(3)]
    return {str(n): {"forward_s": round(fastest[n], 4), "ratio": round(ratios[n], 3)} for n in range(3)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_cost", description="what live LoRAs cost")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    command = ["benchmarks.lora_cost", *argv] if argv is not None else sys.argv
    header = report.header(command, warm_up="the first round of each model")
    found = {name: measure(stage_of(*sizes), arguments.rank, arguments.rounds) for name, sizes in MODELS.items()}
    for name, own in found.items():
        print(f"{name}: with 1 and 2 LoRAs {own['1']['ratio']} and {own['2']['ratio']} times as long as with none")
    if arguments.out is not None:
        report.write_json(arguments.out, header, {"rank": arguments.rank, "loras": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
