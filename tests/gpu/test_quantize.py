"""FP8 on a GPU that multiplies in it: near the bfloat16 model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.models.transformer.quantization import FP8_CAPABILITY
from streamdiff.models.transformer.wan import WanDenoiser, attend
from streamdiff.models.transformer.weights import load_transformer, open_transformer
from tests.small import LATENT_CHANNELS, small_transformer

pytestmark = pytest.mark.gpu


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_it_is_near_the_model_in_bfloat16(mode: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a CUDA device of compute capability 8.9 or more")
    gpu = torch.device("cuda")
    small_transformer(3, layers=3, heads=4, head_dim=16).save_pretrained(tmp_path)
    flows = []
    for kind in ("none", mode):
        denoiser = WanDenoiser(
            load_transformer(open_transformer(tmp_path), device=gpu, dtype=torch.bfloat16, quantize=kind)
        )
        generator = torch.Generator().manual_seed(1)
        latents = torch.randn(1, LATENT_CHANNELS, 3, 8, 8, generator=generator).to(gpu, torch.bfloat16)
        text = torch.randn(1, 16, denoiser.model.config["text_dim"], generator=generator).to(gpu, torch.bfloat16)
        tokens = denoiser.embed(latents, torch.full((1, 3), 500.0, device=gpu))
        tokens = denoiser.run_blocks(tokens, denoiser.text(text), lambda layer, q, k, v: attend(q, k, v))
        flows.append(denoiser.output_layer(tokens, (3, 8, 8)).float())
    error = float((flows[1] - flows[0]).norm() / flows[0].norm())
    assert 1e-4 < error < 0.1
