"""What the folder of an embedded model says of itself, read as JSON: without torch or weights.

model_index.json   transformer/   text_encoder/   tokenizer/   vae/{config.json, diffusion_pytorch_model.safetensors}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.memory_size import Config
from streamdiff.models.checkpoint.json_file import read_object
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
    decoder: Config


def _check_parts(folder: Path) -> None:
    """Raises ConfigError unless the folder has all of a model's parts."""
    for part in _PARTS:
        if not (folder / part).exists():
            raise ConfigError(
                f"model folder {folder} has no {part}; a model is a folder with model_index.json, transformer, "
                "text_encoder, tokenizer and vae. Use the embedded model with `--model tiny`, or train one with "
                "`python -m streamdiff.models.tiny.training`"
            )


def read_folder(folder: Path, name: str) -> FolderFacts:
    """The facts of the model under `folder`, which is called `name`.

    Raises:
        ConfigError: a part that is missing or cannot be read, or a value that is missing or of the wrong kind.
    """
    _check_parts(folder)
    stream = _Table(folder / "model_index.json").table("stream")
    transformer, vae = _Table(folder / "transformer" / "config.json"), _Table(folder / "vae" / "config.json")
    counts = (("decoder_widths", 4, 1), ("decoder_blocks", 3, 0), ("decoder_space", 3, 1), ("decoder_time", 3, 1))
    sizes: Any = {key: vae.integers(key, count, low) for key, count, low in counts}
    decoder = Config(vae.integer("latent_channels"), vae.integer("patch_size"), **sizes)
    known = {field.name for field in fields(ModelSpec)}
    facts = {key: value for key, value in stream.values.items() if key in known}
    for key in ("latent_height", "latent_width", "chunk_latents", "window_latents"):
        facts[key] = stream.integer(key)
    for key, low in (("clean_window_latents", 1), ("sink_latents", 0)):
        facts[key] = stream.integer(key, low) if key in stream.values else {"sink_latents": 0}.get(key)
    facts |= {key: stream.number(key) for key in ("native_fps", "shift")}
    spec = ModelSpec(
        **facts
        | {
            "name": name,
            "latent_channels": decoder.latent_channels,
            "frames_per_latent": decoder.temporal,
            "width": facts["latent_width"] * decoder.spatial,
            "height": facts["latent_height"] * decoder.spatial,
            "steps": stream.integers("steps"),
            "text_shape": (_text_tokens(folder / "tokenizer" / "tokenizer.json"), transformer.integer("text_dim")),
        }
    )
    architecture: dict[str, Any] = {key: transformer.integer(key) for key in _INTEGERS}
    architecture["patch_size"] = transformer.integers("patch_size", 3)
    architecture["cross_attn_norm"] = bool(transformer.values.get("cross_attn_norm", True))
    return FolderFacts(folder, spec, architecture, decoder)


class _Table:
    """A JSON object whose entries are asked for by name and kind."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None) -> None:
        self.path, self.values = path, read_object(path) if values is None else values

    def table(self, key: str) -> _Table:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object with keys")
        return _Table(self.path, value)

    def integer(self, key: str, low: int = 1) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._wrong(key, value, f"a whole number, at least {low}")
        return value

    def integers(self, key: str, count: int | None = None, low: int = 1) -> tuple[int, ...]:
        value = self._get(key)
        good = isinstance(value, list) and all(type(item) is int and item >= low for item in value) and value
        if not good or count not in (None, len(value)):
            raise self._wrong(key, value, f"a list of {count or 'some'} whole numbers, each at least {low}")
        return tuple(value)

    def number(self, key: str) -> float:
        value = self._get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"{self.path}: the key {key!r} is missing")
        return self.values[key]

    def _wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} is {json.dumps(value)[:60]}, but must be {allowed}")


def _text_tokens(path: Path) -> int:
    """The length to which texts are padded; 0 where the tokenizer's file does not say."""
    try:
        length = read_object(path)["padding"]["strategy"]["Fixed"]
    except (ConfigError, KeyError, TypeError):
        return 0
    return length if isinstance(length, int) else 0
