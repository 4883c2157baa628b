"""A model as training begins it, an untrained text encoder, and as it ends: a folder in diffusers layout."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers.models.umt5.configuration_umt5 import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny.model import WORDS, TinyText
from streamdiff.models.transformer.weights import FILE
from training.embedded import PAD, TEXT_TOKENS, UNKNOWN, WIDTH


def build_tokenizer() -> Tokenizer:
    """A tokenizer of whole words, those that sentences of scenes have; texts are padded or cut to TEXT_TOKENS."""
    vocabulary = {word: index for index, word in enumerate([PAD, UNKNOWN, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(TEXT_TOKENS)
    tokenizer.enable_padding(length=TEXT_TOKENS, pad_id=0, pad_token=PAD)
    return tokenizer


def build_encoder(vocabulary_size: int) -> UMT5EncoderModel:
    """An untrained encoder."""
    config = UMT5Config(
        vocab_size=vocabulary_size,
        d_model=WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
    )
    return UMT5EncoderModel(config)


def build_text() -> TinyText:
    """An untrained one."""
    tokenizer = build_tokenizer()
    return TinyText(tokenizer, build_encoder(tokenizer.get_vocab_size()))


def save_model(
    folder: Path,
    autoencoder: TAEHV,
    mean: Tensor,
    std: Tensor,
    parts: tuple[TinyText, WanTransformer3DModel] | None,
    stream: dict[str, object],
) -> None:
    """Write the model in half precision (it is loaded in float32); without `parts` only the autoencoder.

    Mutates: the parts, which become half precision.
    """
    (folder / "vae").mkdir(parents=True, exist_ok=True)
    config = {**asdict(autoencoder.config), "latents_mean": mean.tolist(), "latents_std": std.tolist()}
    (folder / "vae" / "config.json").write_text(json.dumps({"_class_name": "TAEHV", **config}, indent=2) + "\n")
    weights = {name: tensor.half().contiguous() for name, tensor in autoencoder.state_dict().items()}
    save_file(weights, folder / "vae" / FILE)
    if parts is None:
        return
    text, transformer = parts
    torch.nn.Module.half(text.encoder)
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    text.tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    text.encoder.save_pretrained(folder / "text_encoder")
    torch.nn.Module.half(transformer)
    transformer.save_pretrained(folder / "transformer")
    classes = {
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "vae": ["streamdiff", "TAEHV"],
    }
    index = {"_class_name": "StreamdiffTiny", **classes, "stream": stream}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
