"""Checkpoints as other programs write them, made from a diffusers model."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from streamdiff.models.checkpoint import Checkpoint
from streamdiff.models.transformer import rope
from streamdiff.models.transformer.tensor_names import NameLayout, Names
from streamdiff.models.transformer.wan import WanDenoiser, attend
from streamdiff.models.transformer.weights import load_transformer, open_transformer
from tests.small import CPU, LATENT_CHANNELS, small_transformer

State = dict[str, Tensor]


def original_name(name: str) -> str:
    """What original Wan calls a tensor of diffusers (diffusers' own conversion is asked in test_weights)."""
    return Names(NameLayout.WAN).spell(name)


def original(state: State) -> State:
    """All tensors under original Wan's names."""
    return {original_name(name): tensor for name, tensor in state.items()}


def prefixed(state: State, prefix: str) -> State:
    """All names with something in front."""
    return {prefix + name: tensor for name, tensor in state.items()}


def wrapped(state: State) -> State:
    """As FSDP, activation checkpoints and torch.compile leave names, inside as well as in front."""
    return {
        "model._fsdp_wrapped_module."
        + re.sub(r"^(blocks\.\d+)\.", r"\1._orig_mod._checkpoint_wrapped_module.", name): t
        for name, t in state.items()
    }


def rcm(state: State) -> State:
    """Original names with the patch embedding as the matrix of a linear layer."""
    return {
        f"net.{name}": tensor.flatten(1) if name == "patch_embedding.weight" else tensor
        for name, tensor in original(state).items()
    }


def fused(state: State, own: str = "self_attn.{}.", one: str = "self_attn.to_qkv.") -> State:
    """Original names with one projection for query, key and value."""
    state = original(state)
    for name in [name for name in state if own.format("q") in name]:
        parts = [state.pop(name.replace(own.format("q"), own.format(letter))) for letter in "qkv"]
        state[name.replace(own.format("q"), one)] = torch.cat(parts)
    return state


def write_shards(folder: Path, state: State, shards: list[list[str]], stem: str = "diffusion_pytorch_model") -> None:
    """A sharded checkpoint with its index; `shards` holds the names in each file."""
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: state[name].clone() for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


SIZES: dict[str, tuple[dict[str, int], int]] = {
    "1.3B": ({"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, 825),
    "14B": ({"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}, 1095),
    "14B image": (
        {"num_layers": 40, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514},
        1304,
    ),
}


def published(size: str) -> dict[str, torch.Tensor]:
    """Tensors of a published architecture, without memory."""
    with torch.device("meta"):
        return WanTransformer3DModel(**SIZES[size][0]).state_dict()


def write_zeros(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file in bfloat16 whose tensors are 1 and then a hole in the file: large, but little on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + end)
        for entry in header.values():
            file.seek(start + entry["data_offsets"][0])
            file.write(b"\x80\x3f")


def save(path: Path, state: State) -> Path:
    """One safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


HEADS = {"num_attention_heads": 2}


def load(path: Path, **options: object) -> WanTransformer3DModel:
    """The whole model in float32, the number of heads given, unless `options` say otherwise."""
    config = options.pop("config", HEADS)
    file = open_transformer(path, options.pop("container", None), config)  # type: ignore[arg-type]
    return load_transformer(file, **{"device": CPU, "dtype": torch.float32, **options})  # type: ignore[arg-type]


def small_state(layers: int = 2) -> State:
    """The tensors of a small model, to be written under other names."""
    return dict(small_transformer(3, layers=layers, planes=0).state_dict())


def assert_same(model: WanTransformer3DModel, expected: WanTransformer3DModel) -> None:
    """All tensors are equal, and so is what the models predict."""
    state = model.state_dict()
    assert set(state) == set(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0, msg=name)
    assert flow(expected).std() > 0.1, "the comparison would mean nothing for a model that predicts zero"
    torch.testing.assert_close(flow(model), flow(expected), rtol=0, atol=0)


class Counting(Checkpoint):
    """A checkpoint that remembers what was read of it."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner.path, inner.entries, self._read, inner.names, inner.container, inner.config)
        self.inner = inner
        self.reads: list[str] = []

    def _read(self, name: str) -> Tensor:
        self.reads.append(name)
        return self.inner.read(name)


@torch.inference_mode()
def flow(model: WanTransformer3DModel) -> Tensor:
    """What a model predicts for some clip and text, in float32; latents have tests.small's channels."""
    denoiser = WanDenoiser(model)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, LATENT_CHANNELS, 3, 4, 6, generator=generator).to(denoiser.dtype)
    text = torch.randn(1, 5, model.config.text_dim, generator=generator).to(denoiser.dtype)

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        table = rope.table(torch.arange(3), 2, 3, query.shape[-1])
        return attend(rope.rotate(query, table), rope.rotate(key, table), value)

    tokens = denoiser.embed(latents, torch.tensor([[900.0, 500.0, 100.0]]))
    return denoiser.output_layer(denoiser.run_blocks(tokens, denoiser.text(text), attention), (3, 4, 6)).float()
