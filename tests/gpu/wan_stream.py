"""A model of Wan's kind, small but for its heads, streamed as the product streams it: through `build_pipeline`, two
sessions at once, in the types and by the kernels that a GPU has.

`python -m tests.gpu.wan_stream RANK STAGES PORT FOLDER OUT VARIANT DEVICE` is one rank of a ring over NCCL, or, with
DEVICE `cpu`, over a transport of its manners; rank 0 writes the latents to OUT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from benchmarks.gpu_check import two_streams
from streamdiff.config import ModelConfig
from streamdiff.engine.process.launcher import open_store
from streamdiff.pipeline import topology
from streamdiff.pipeline.worker_main import run_worker
from tests.models.text_encoder import umt5
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
from tests.pipeline.processes import run_ranks
from tests.small_vae import small_wan_autoencoder

HEAD_WIDTH = 128
"""Of every published model of this kind; kernels and graphs differ by it."""
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"dtype": "float32", "attention": "sdpa"},
    "flash": {"dtype": "bfloat16", "attention": "flash"},
    "cudnn": {"dtype": "bfloat16", "attention": "cudnn"},
    "fp8": {"dtype": "bfloat16", "quantize": "fp8"},
    "graphs": {"dtype": "bfloat16", "compile": "on"},
    "default": {"preset": "default"},
}
LIMIT_S = 900.0


def write_model(folder: Path) -> None:
    """The parts of a small model, as diffusers writes them."""
    autoencoder = small_wan_autoencoder()
    autoencoder.save_pretrained(folder / "vae")
    umt5.write(folder / "text")
    channels = autoencoder.config.z_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=HEAD_WIDTH,
            in_channels=channels,
            out_channels=channels,
            text_dim=umt5.WIDTH,
            freq_dim=256,
            ffn_dim=512,
            num_layers=4,
            cross_attn_norm=True,
        )
    transformer.save_pretrained(folder / "transformer")


def config_of(folder: Path, variant: str, device: str, **more: Any) -> ModelConfig:
    """Self-Forcing's stream of the model in `folder`."""
    parts = {"weights": folder / "transformer", "vae": folder / "vae", "text_encoder": folder / "text"}
    values = {
        "name": "self-forcing",
        "size": "64x32",
        "device": device,
        "preset": "plain",
        "window": 9 if device == "cpu" else None,  # as few chunks as fill it and go on
        **{k: str(v) for k, v in parts.items()},
    }
    return ModelConfig.model_validate({**values, **VARIANTS[variant], **more})


def ring_of(folder: Path, variant: str, device: str, stages: int) -> torch.Tensor:
    """`two_streams` over a ring of processes."""
    store, out = open_store(), folder / f"{variant}-{stages}.pt"
    arguments = [str(folder), str(out), variant, device, str(store.port)]
    run_ranks("tests.gpu.wan_stream", arguments, stages, LIMIT_S, forked=device == "cpu")
    latents: torch.Tensor = torch.load(out, weights_only=True)
    return latents


def main(rank: int, stages: int, folder: Path, out: Path, variant: str, device: str, port: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(stages)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(stages), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as the launcher does
    if device == "cpu":
        use_rendezvous()
        topology.link_of = lambda config, device: "nccl"
    config = config_of(folder, variant, device, stages=stages)
    if rank:
        run_worker(config)
    else:
        torch.save(two_streams(config)[0].cpu(), out)
    os._exit(0)  # communicators are ended by leaving


if __name__ == "__main__":
    rank, stages, _, folder, out, variant, device, port = sys.argv[1:]
    main(int(rank), int(stages), Path(folder), Path(out), variant, device, port)
