"""Finds the files of Wan's text encoder, and builds the encoder from them, in diffusers' layout or original Wan's.

The original repository's file, `models_t5_umt5-xxl-enc-bf16.pth`, holds the encoder alone, under names of its own;
sizes are read from its shapes. The names are those of github.com/Wan-Video/Wan2.1 (wan/modules/t5.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.models.umt5.configuration_umt5 import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.checkpoint import open_checkpoint
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.checkpoint.module import check_fit

_SHARE = 3  # the rest of a GPU's free memory is for sessions
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
_WEIGHTS = "models_t5*.pth"
_TOKENIZERS = ("google/umt5-xxl", "umt5-xxl", "tokenizer", ".")
_MAX_DISTANCE = 128  # of relative positions: in no tensor, and the same in every UMT5
_STEMS = ("model",)
_TABLE, _SAME_TABLE = "shared.weight", "encoder.embed_tokens.weight"
"""The table of words, by both of its names. A file has one of them, or both, whatever its config.json says of them."""
_TOP = {"token_embedding.weight": _TABLE, "norm.weight": "encoder.final_layer_norm.weight"}
_BLOCK = {
    "norm1": "layer.0.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}


@dataclass(frozen=True)
class TextFiles:
    """`weights` is a folder with `config.json`, as diffusers has it, or the original file; `tokenizer` is a folder."""

    weights: Path
    tokenizer: Path

    @property
    def original(self) -> bool:
        """Whether it is the original file."""
        return not self.weights.is_dir()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights, by their stored names. Reads headers, no weights.

        Raises:
            ConfigError: there are no weights, or they are damaged.
        """
        checkpoint = open_checkpoint(self.weights, names=_STEMS)
        return {name: checkpoint.entries[name].shape for name in checkpoint.names}

    @property
    def values(self) -> int:
        """How many numbers the encoder's weights are; ConfigError as `shapes`."""
        return sum(map(prod, self.shapes.values()))


def find(path: Path) -> TextFiles:
    """The parts at `path`: a folder with `text_encoder` and `tokenizer`; the original file, with the tokenizer in
    `google/umt5-xxl` or `tokenizer` beside it; or the folder that has these two.

    Raises:
        ConfigError: a file without a tokenizer, or several that could be meant.
    """
    if path.is_file():
        return TextFiles(path, _tokenizer_beside(path))
    files = [] if (path / "text_encoder").is_dir() else sorted(path.glob(_WEIGHTS))
    if len(files) > 1:
        raise ConfigError(
            f"{path}: has {len(files)} text encoders ({', '.join(file.name for file in files)}); name one"
        )
    if files:
        return TextFiles(files[0], _tokenizer_beside(files[0]))
    return TextFiles(path / "text_encoder", path / "tokenizer")


def _tokenizer_beside(file: Path) -> Path:
    for place in _TOKENIZERS:
        folder = file.parent / place
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return folder
    raise ConfigError(
        f"{file}: there is no tokenizer beside it; the original repository has it in {file.parent / _TOKENIZERS[0]} "
        f"({' or '.join(TOKENIZER_FILES)})"
    )


def read_sizes(files: TextFiles, width: int | None) -> tuple[int, int]:
    """Width and number of words of the encoder; the width must be `width` if that is given.

    Raises:
        ConfigError: no encoder of this kind, or another width.
    """
    if files.original:
        path, sizes = files.weights, original_sizes(files)
        found, words = sizes.d_model, sizes.vocab_size
    else:
        path = files.weights / "config.json"
        found, words = _read_config(path)
    if width is not None and found != width:
        raise ConfigError(
            f"{path}: the text encoder is {found} wide (d_model), but the transformer asks for {width} (text_dim)"
        )
    return found, words


def _read_config(path: Path) -> tuple[int, int]:
    """Width and number of words of the encoder in a folder."""
    try:
        config = read_object(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; diffusers' layout has the text encoder there") from None
    kind = config.get("model_type")
    if kind != "umt5" or not all(isinstance(config.get(key), int) for key in ("d_model", "vocab_size")):
        raise ConfigError(
            f"{path}: expected a UMT5 encoder (model_type umt5, with d_model and vocab_size), got model_type {kind!r}"
        )
    return config["d_model"], config["vocab_size"]


def original_sizes(files: TextFiles) -> UMT5Config:
    """The encoder's configuration, inferred from the shapes in the original file.

    Raises:
        ConfigError: it is not that file.
    """

    def sides(name: str) -> Sequence[int]:
        found = files.shapes.get(name, ())
        if len(found) != 2:
            raise ConfigError(
                f"{files.weights}: not Wan's text encoder: expected {name} of two axes, found {list(found) or 'none'} "
                f"among {len(files.shapes)} tensors ({', '.join([*files.shapes][:3])}, ...)"
            )
        return found

    words, width = sides("token_embedding.weight")
    buckets, heads = sides("blocks.0.pos_embedding.embedding.weight")
    numbers = [int(found[1]) for name in files.shapes if (found := re.match(r"blocks\.(\d+)\.", name))]
    return UMT5Config(
        vocab_size=words,
        d_model=width,
        d_kv=sides("blocks.0.attn.q.weight")[0] // heads,
        d_ff=sides("blocks.0.ffn.fc1.weight")[0],
        num_layers=1 + max(numbers),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=_MAX_DISTANCE,
        feed_forward_proj="gated-gelu",
    )


def load_encoder(files: TextFiles, device: torch.device, dtype: torch.dtype) -> UMT5EncoderModel:
    """The encoder, for inference.

    Raises:
        ConfigError: no such encoder; or tensors that are missing, unexpected or misshapen, which are listed.
    """
    path = files.weights
    checkpoint = open_checkpoint(path, names=_STEMS)
    try:
        config = original_sizes(files) if files.original else UMT5Config.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            encoder = UMT5EncoderModel(config)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path}: the text encoder cannot be loaded: {error}") from error
    found = {_name(name): checkpoint.read(name) for name in checkpoint.names}
    if (table := found.pop(_SAME_TABLE, None)) is not None:
        found.setdefault(_TABLE, table)
    wanted = {name: tensor.shape for name, tensor in encoder.state_dict().items() if name != _SAME_TABLE}
    check_fit(path, found, wanted)
    encoder.load_state_dict({name: found.pop(name).to(device, dtype) for name in wanted}, strict=False, assign=True)
    encoder.set_input_embeddings(encoder.shared)
    encoder.requires_grad_(False)
    encoder.train(False)
    return encoder


def _name(original: str) -> str:
    """transformers' name of a tensor of the original file; an unknown name stays as it is."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", original)
    if match is None or match[2] not in _BLOCK:
        return _TOP.get(original, original)
    return f"encoder.block.{match[1]}.{_BLOCK[match[2]]}.weight"


def load_tokenizer(path: Path, words: int) -> Any:
    """The tokenizer of an encoder that knows `words` words."""
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; diffusers' layout has the tokenizer there")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers would make one without words
        raise ConfigError(f"{path}: no tokenizer that can be read: expected {' or '.join(TOKENIZER_FILES)}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side="right")
    except Exception as error:  # a damaged file makes the tokenizers library raise just that
        raise ConfigError(f"{path}: no tokenizer that can be read: {error}") from error
    if len(tokenizer) > words:
        raise ConfigError(
            f"{path}: the tokenizer has {len(tokenizer):,} words, but the text encoder beside it knows {words:,}; they "
            "do not belong together"
        )
    return tokenizer


def choose_device(files: TextFiles, device: torch.device) -> torch.device:
    """Where the encoder runs beside a transformer on `device`, whose weights are there already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if files.values * torch.bfloat16.itemsize <= free // _SHARE:
            return device
    return torch.device("cpu")


def revision(files: TextFiles) -> str:
    """Of the files as they are now; weights are not read."""
    digest, weights = hashlib.sha256(), [files.weights] if files.original else files.weights.glob("*")
    for path in sorted([*weights, *files.tokenizer.glob("*")]):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
