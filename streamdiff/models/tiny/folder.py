"""Reads and checks the JSON files of an embedded model's folder, without torch or weights.

model_index.json   transformer/   text_encoder/   tokenizer/   vae/{config.json, diffusion_pytorch_model.safetensors}
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.memory_size import TaehvConfig
from streamdiff.models.spec import ModelSpec
from streamdiff.models.weight_files import Count, Positive, read_object, validated

_FILE = "diffusion_pytorch_model.safetensors"
_PARTS = (
    "model_index.json",
    "transformer/config.json",
    f"transformer/{_FILE}",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer.json",
    "vae/config.json",
    f"vae/{_FILE}",
)


class _Transformer(BaseModel):
    """Arguments of diffusers' `WanTransformer3DModel` that its config.json has to say, or may."""

    patch_size: tuple[Count, Count, Count]
    num_layers: Count
    num_attention_heads: Count
    attention_head_dim: Count
    ffn_dim: Count
    text_dim: Count
    freq_dim: Count
    in_channels: Count
    out_channels: Count
    cross_attn_norm: bool = True
    eps: Positive = 1e-6
    rope_max_seq_len: Count = 1024


@dataclass(frozen=True)
class FolderFacts:
    """Of the model under `folder`: `spec` are its facts, `architecture` arguments of diffusers'
    `WanTransformer3DModel`, `decoder` the shape of the autoencoder."""

    folder: Path
    spec: ModelSpec
    architecture: dict[str, Any]
    decoder: TaehvConfig


def read_folder(folder: Path, name: str) -> FolderFacts:
    """The facts of the model under `folder`, which is called `name`.

    Raises:
        ConfigError: a part that is missing or cannot be read, a value that is missing or of the wrong kind, a window
            that holds too little, or more controls than the transformer has inputs for.
    """
    if missing := [part for part in _PARTS if not (folder / part).exists()]:
        raise ConfigError(
            f"model folder {folder} has no {missing[0]}; a model is a folder with model_index.json, transformer, "
            "text_encoder, tokenizer and vae. Use the embedded model with `--model tiny`, or train one with "
            "`python -m training`"
        )
    transformer = validated(folder / "transformer" / "config.json", _Transformer)
    decoder = validated(folder / "vae" / "config.json", TaehvConfig)
    match read_object(folder / "tokenizer" / "tokenizer.json"):
        case {"padding": {"strategy": {"Fixed": int(text_tokens)}}}:
            pass
        case _:  # it does not say to which length texts are padded
            text_tokens = 0
    index = folder / "model_index.json"
    stream = read_object(index).get("stream")
    facts = {
        "name": name,
        "latent_channels": decoder.latent_channels,
        "frames_per_latent": decoder.temporal,
        "text_shape": (text_tokens, transformer.text_dim),
    }
    usual = {"sink_latents": 0, "width": 0, "height": 0}  # the last two until the file's own sizes are checked
    spec = validated(index, ModelSpec, {**usual, **(stream if isinstance(stream, dict) else {}), **facts})
    spec = replace(spec, width=spec.latent_width * decoder.spatial, height=spec.latent_height * decoder.spatial)
    planes = transformer.in_channels - transformer.out_channels
    names = [control.name for control in spec.controls]
    if not all(names) or len(set(names)) != len(names) or len(names) > planes:
        raise ConfigError(
            f"{folder}: controls are {', '.join(names)}, but the transformer has {planes} input channels "
            "beside the latents'; each control needs one, and a name of its own"
        )
    tokens = prod(size // patch for size, patch in zip(spec.chunk_shape[1:], transformer.patch_size, strict=True))
    if tokens < 1 or min(map(spec.window, ("same_step", "clean"))) < spec.sink_latents + spec.chunk_latents:
        raise ConfigError(
            f"{folder}: a chunk has {tokens} tokens, and a window must hold at least the sink and one chunk"
        )
    return FolderFacts(folder, spec, dict(transformer), decoder)
