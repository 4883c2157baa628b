"""A small checkpoint with the files that go with it, for `streamdiff generate` by numbers and files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.cli import main
from streamdiff.models import sampling
from tests.models.layouts import original
from tests.small import LATENT_CHANNELS, small_transformer

STEPS = (1000.0, 833.0, 500.0)
CHUNKS, CHUNK, SIDE, TOKENS = 6, 3, 4, 5


def last_of_each(words: list[str]) -> list[str]:
    """A command line without options, and their values, that come again later, as the command refuses them."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    kept = words[: starts[0]]
    for place, end in zip(starts, [*starts[1:], len(words)], strict=True):
        if words[place] not in words[end:] or words[place] in ("--prompt-switch", "--lora"):
            kept += words[place:end]
    return kept


@dataclass
class Given:
    """A small checkpoint in original Wan's layout, and the files that go with it."""

    folder: Path
    model: WanTransformer3DModel

    @property
    def text(self) -> Tensor:
        return load_file(self.folder / "text.safetensors")["prompt_embeds"]

    def command(
        self, *extra: str, steps: str = "1000,833,500", chunks: int = CHUNKS, out: Path | None = None
    ) -> list[str]:
        files: dict[str, str | Path] = {"model": "wan.pt", "model-config": "config.json"}
        files |= {"noise": "noise.safetensors", "latents-out": out or "out.safetensors"}
        optional = {"prompt-embeds": "text", "condition": "condition", "image-features": "clip", "controls": "controls"}
        there = {option: f"{name}.safetensors" for option, name in optional.items()}
        files |= {option: name for option, name in there.items() if (self.folder / name).exists()}
        said = [part for option, name in files.items() for part in (f"--{option}", str(self.folder / name))]
        words = ["generate", *said, "--steps", steps, "--chunks", str(chunks), "--no-decode", "--overwrite", *extra]
        return last_of_each(words)

    def latents(self, *extra: str, steps: str = "1000,833,500", chunks: int = CHUNKS) -> Tensor:
        assert main.main(self.command(*extra, steps=steps, chunks=chunks)) == 0
        return load_file(self.folder / "out.safetensors")["latents"]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    return checkpoint(tmp_path)


def checkpoint(folder: Path, layers: int = 3, heads: int = 2, planes: int = 0) -> Given:
    """The checkpoint of so many blocks and more input channels, with noise and two texts, in a folder."""
    model = small_transformer(5, layers=layers, heads=heads, planes=planes)
    torch.save({"generator": original(model.state_dict()), "step": 7}, folder / "wan.pt")
    config = {"num_attention_heads": model.config.num_attention_heads}
    (folder / "config.json").write_text(json.dumps(config | {"attention_head_dim": model.config.attention_head_dim}))
    shape = (LATENT_CHANNELS, CHUNK, SIDE, SIDE)
    draw = lambda chunk, step: sampling.noise(shape, seed=3, chunk=chunk, step=step)  # noqa: E731
    initial = torch.stack([draw(chunk, 0) for chunk in range(CHUNKS)])
    renoise = torch.stack([torch.stack([draw(chunk, step) for step in (1, 2)]) for chunk in range(CHUNKS)])
    save_file({"initial": initial, "renoise": renoise}, folder / "noise.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in ("text", "other"):
        rows = torch.randn(1, TOKENS, model.config.text_dim, generator=generator)
        save_file({"prompt_embeds": rows}, folder / f"{name}.safetensors")
    return Given(folder, model)
