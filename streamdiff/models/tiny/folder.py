"""Reads and checks the JSON files of an embedded model's folder, without torch or weights.

model_index.json   transformer/   text_encoder/   tokenizer/   vae/{config.json, diffusion_pytorch_model.safetensors}
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.memory_size import TaehvConfig
from streamdiff.models.checkpoint.json_file import Table
from streamdiff.models.spec import ModelSpec

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
_INTEGERS = (
    "num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "text_dim", "freq_dim", "in_channels",
    "out_channels",
)  # fmt: skip


@dataclass(frozen=True)
class FolderFacts:
    """Of the model under `folder`: `spec` are its facts, `architecture` arguments of diffusers'
    `WanTransformer3DModel`, `decoder` the shape of the autoencoder."""

    folder: Path
    spec: ModelSpec
    architecture: dict[str, Any]
    decoder: TaehvConfig

    @property
    def weights(self) -> Path:
        """The transformer's file."""
        return self.folder / "transformer" / _FILE


def _check_parts(folder: Path) -> None:
    """Raises ConfigError unless the folder has all of a model's parts."""
    for part in _PARTS:
        if not (folder / part).exists():
            raise ConfigError(
                f"model folder {folder} has no {part}; a model is a folder with model_index.json, transformer, "
                "text_encoder, tokenizer and vae. Use the embedded model with `--model tiny`, or train one with "
                "`python -m training`"
            )


def read_folder(folder: Path, name: str) -> FolderFacts:
    """The facts of the model under `folder`, which is called `name`.

    Raises:
        ConfigError: a part that is missing or cannot be read, a value that is missing or of the wrong kind, or a window
            that holds too little.
    """
    _check_parts(folder)
    stream = Table(folder / "model_index.json").table("stream")
    transformer, vae = Table(folder / "transformer" / "config.json"), Table(folder / "vae" / "config.json")
    try:
        text_tokens = Table(folder / "tokenizer" / "tokenizer.json").table("padding").table("strategy").integer("Fixed")
    except ConfigError:  # where the tokenizer's file does not say to which length texts are padded
        text_tokens = 0
    counts = (("decoder_widths", 4, 1), ("decoder_blocks", 3, 0), ("decoder_space", 3, 1), ("decoder_time", 3, 1))
    sizes: Any = {key: vae.integers(key, count, low) for key, count, low in counts}
    decoder = TaehvConfig(vae.integer("latent_channels"), vae.integer("patch_size"), **sizes)
    known = {field.name for field in fields(ModelSpec)}
    facts = {key: value for key, value in stream.values.items() if key in known}
    for key in ("latent_height", "latent_width", "chunk_latents", "window_latents"):
        facts[key] = stream.integer(key)
    for key, low in (("clean_window_latents", 1), ("sink_latents", 0)):
        facts[key] = stream.integer(key, low) if key in stream.values else {"sink_latents": 0}.get(key)
    facts |= {key: stream.number(key) for key in ("native_fps", "shift")}
    for key in ("control_axes", "control_buttons"):
        facts[key] = stream.names(key) if key in stream.values else ()
    spec = ModelSpec(
        **facts
        | {
            "name": name,
            "latent_channels": decoder.latent_channels,
            "frames_per_latent": decoder.temporal,
            "width": facts["latent_width"] * decoder.spatial,
            "height": facts["latent_height"] * decoder.spatial,
            "steps": stream.integers("steps"),
            "text_shape": (text_tokens, transformer.integer("text_dim")),
        }
    )
    architecture: dict[str, Any] = {key: transformer.integer(key) for key in _INTEGERS}
    architecture["patch_size"] = transformer.integers("patch_size", 3)
    architecture["cross_attn_norm"] = bool(transformer.values.get("cross_attn_norm", True))
    architecture |= {key: value for key, value in transformer.values.items() if key in ("eps", "rope_max_seq_len")}
    planes = architecture["in_channels"] - architecture["out_channels"]
    if len(spec.controls) > planes:
        raise ConfigError(
            f"{folder}: controls are {', '.join(spec.controls)}, but the transformer has {planes} input channels "
            "beside the latents'; each control needs one"
        )
    tokens = prod(size // patch for size, patch in zip(spec.chunk_shape[1:], architecture["patch_size"], strict=True))
    if tokens < 1 or min(map(spec.window, ("same_step", "clean"))) < spec.sink_latents + spec.chunk_latents:
        raise ConfigError(
            f"{folder}: a chunk has {tokens} tokens, and a window must hold at least the sink and one chunk"
        )
    return FolderFacts(folder, spec, architecture, decoder)
