"""A small UMT5 with a tokenizer of its own, written as a diffusers folder has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

WIDTH = 32
WORDS = [
    "a red fox trots through fresh snow at dawn & the camera follows",
    "two blue stars over a quiet harbour, seen from far away",
]


def write(folder: Path, seed: int = 0, width: int = WIDTH) -> UMT5EncoderModel:
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
        relative_attention_max_distance=16,
        tie_word_embeddings=False,  # as Wan's checkpoints say
    )
    encoder = UMT5EncoderModel(config).train(False)
    encoder.set_input_embeddings(encoder.shared)  # one table, whatever the configuration says
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    encoder.save_pretrained(folder / "text_encoder", max_shard_size="20KB")
    return encoder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(WORDS * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer
