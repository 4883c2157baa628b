"""Where the parts of Wan's text encoder lie, and the encoder from the file that the original repository has.

That file, `models_t5_umt5-xxl-enc-bf16.pth`, holds the encoder alone, under names of its own; sizes are read from its
shapes. The names are those of github.com/Wan-Video/Wan2.1 (wan/modules/t5.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from transformers import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.checkpoint import Checkpoint, check_fit, open_checkpoint

TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
_WEIGHTS = "models_t5*.pth"
_TOKENIZERS = ("google/umt5-xxl", "umt5-xxl", "tokenizer", ".")
_MAX_DISTANCE = 128  # of relative positions: in no tensor, and the same in every UMT5
_TOP = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
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

    def values(self) -> int:
        """How many numbers the encoder's weights are. Reads headers, no weights.

        Raises:
            ConfigError: there are no weights, or they are damaged.
        """
        checkpoint = open_checkpoint(self.weights, names=("model",))
        return sum(prod(checkpoint.entry(name).shape) for name in checkpoint.names)

    def paths(self) -> Iterator[Path]:
        """Every file."""
        yield from [self.weights] if self.original else self.weights.glob("*")
        yield from self.tokenizer.glob("*")


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


def original_sizes(file: Path) -> UMT5Config:
    """The configuration that the shapes in the original file tell.

    Raises:
        ConfigError: it is not that file.
    """
    checkpoint = open_checkpoint(file)
    words, width = _shape(checkpoint, "token_embedding.weight")
    buckets, heads = _shape(checkpoint, "blocks.0.pos_embedding.embedding.weight")
    inner, _ = _shape(checkpoint, "blocks.0.attn.q.weight")
    wide, _ = _shape(checkpoint, "blocks.0.ffn.fc1.weight")
    numbers = [int(found[1]) for name in checkpoint.names if (found := re.match(r"blocks\.(\d+)\.", name))]
    return UMT5Config(
        vocab_size=words,
        d_model=width,
        d_kv=inner // heads,
        d_ff=wide,
        num_layers=1 + max(numbers),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=_MAX_DISTANCE,
        feed_forward_proj="gated-gelu",
    )


def load_original(file: Path, device: torch.device, dtype: torch.dtype) -> UMT5EncoderModel:
    """The encoder in the original file.

    Raises:
        ConfigError: it is not that file; or tensors are missing, unexpected or misshapen, which are listed.
    """
    checkpoint = open_checkpoint(file)
    with torch.device("meta"):
        encoder = UMT5EncoderModel(original_sizes(file))
    found = {_name(name): checkpoint.read(name) for name in checkpoint.names}
    table = "encoder.embed_tokens.weight"  # the same as `shared`, by another name
    wanted = {name: tensor.shape for name, tensor in encoder.state_dict().items() if name != table}
    check_fit(file, found, wanted)
    encoder.load_state_dict({name: found.pop(name).to(device, dtype) for name in wanted}, strict=False, assign=True)
    encoder.set_input_embeddings(encoder.shared)
    encoder.requires_grad_(False)
    encoder.train(False)
    return encoder


def _name(original: str) -> str:
    """What transformers calls it; what it does not know stays as it is."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", original)
    if match is None or match[2] not in _BLOCK:
        return _TOP.get(original, original)
    return f"encoder.block.{match[1]}.{_BLOCK[match[2]]}.weight"


def _shape(checkpoint: Checkpoint, name: str) -> Sequence[int]:
    shape: Sequence[int] = checkpoint.entry(name).shape if name in checkpoint.names else ()
    if len(shape) != 2:
        found = ", ".join(checkpoint.names[:3])
        raise ConfigError(
            f"{checkpoint}: not Wan's text encoder: expected {name} of two axes, found {list(shape) or 'none'} among "
            f"{len(checkpoint.names)} tensors ({found}, ...)"
        )
    return shape
