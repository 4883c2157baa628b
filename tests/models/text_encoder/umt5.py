"""A small UMT5 with a tokenizer of its own, written as a diffusers folder has them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.models import text_encoder

WIDTH = 32
WORDS = [
    "a red fox trots through fresh snow at dawn & the camera follows",
    "two blue stars over a quiet harbour, seen from far away",
]


def write(folder: Path, seed: int = 0, width: int = WIDTH, max_distance: int = 16) -> UMT5EncoderModel:
    """Write `tokenizer/` and `text_encoder/`, the weights in several files; returns the encoder that was written."""
    tokenizer = _tokenizer()
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({**settings, "extra_ids": 0}))
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=width,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=max_distance,
        tie_word_embeddings=False,  # as Wan's checkpoints say
    )
    encoder = UMT5EncoderModel(config).train(False)
    encoder.set_input_embeddings(encoder.shared)  # one table, whatever the configuration says
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    encoder.save_pretrained(folder / "text_encoder", max_shard_size="20KB")
    return encoder


def take_for_the_published_one(encoder: UMT5EncoderModel, patch: pytest.MonkeyPatch) -> None:
    """Let a file in original names be as large as `encoder`. Mutates: patch."""
    sizes = {name: getattr(encoder.config, name) for name in text_encoder._UMT5["config"]}
    patch.setitem(text_encoder._UMT5, "config", sizes)


def write_original(folder: Path, source: Path, encoder: UMT5EncoderModel) -> Path:
    """Write `encoder` and the tokenizer in `source` as the original repository has them; returns the file. Written from
    the original names, without a look at the loader's table."""
    names = {"shared.weight": "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}
    inner = [
        ("layer.0.layer_norm", "norm1"),
        ("layer.0.SelfAttention.relative_attention_bias", "pos_embedding.embedding"),
        *((f"layer.0.SelfAttention.{letter}", f"attn.{letter}") for letter in "qkvo"),
        ("layer.1.layer_norm", "norm2"),
        ("layer.1.DenseReluDense.wi_0", "ffn.gate.0"),
        ("layer.1.DenseReluDense.wi_1", "ffn.fc1"),
        ("layer.1.DenseReluDense.wo", "ffn.fc2"),
    ]
    for block in range(encoder.config.num_layers):
        names |= {f"encoder.block.{block}.{ours}.weight": f"blocks.{block}.{theirs}.weight" for ours, theirs in inner}
    state = encoder.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "models_t5_umt5-xxl-enc-bf16.pth"
    torch.save({theirs: state[ours] for ours, theirs in names.items()}, file)
    shutil.copytree(source / "tokenizer", folder / "google" / "umt5-xxl")
    return file


def sentence_piece(folder: Path) -> bytes:
    """The tokenizer of a folder that `write` made as SentencePiece's file: a message of protocol buffers."""
    words = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = [(word.encode(), struct.pack("<f", score)) for word, score in words]
    inner = [b"\x0a" + bytes([len(word)]) + word + b"\x15" + score + b"\x18\x01" for word, score in pieces]
    trainer = b"\x12\x04\x18\x01\x20\x50"  # model_type and vocab_size, which do not count here
    return b"".join(b"\x0a" + bytes([len(each)]) + each for each in inner) + trainer + b"\x1a\x02\x18\x01"


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(WORDS * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer
