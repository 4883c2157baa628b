"""The embedded model's text encoder, from its folder in diffusers' layout (`tiny.folder`): a word-level tokenizer and a
small UMT5, as in Wan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel
from transformers.utils import logging as transformers_logging

from streamdiff.errors import ConfigError
from streamdiff.models.spec import ParsedPrompt, TextEncoder
from streamdiff.models.tiny import prompts

WORDS = prompts.known_words()
"""Of the sentences that prompts are turned into."""


class TinyText(TextEncoder):
    """The embedded model's."""

    examples = prompts.EXAMPLES
    suggestions = prompts.SUGGESTIONS
    vocabulary = prompts.VOCABULARY

    def __init__(self, tokenizer: Tokenizer, encoder: UMT5EncoderModel) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> TinyText:
        """Read `tokenizer/tokenizer.json` and `text_encoder/` of a model folder, in float32.

        Raises:
            ConfigError: it was trained on other words than prompts are turned into.
        """
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        if missing := sorted(set(WORDS) - tokenizer.get_vocab().keys()):
            raise ConfigError(
                f"{folder} was trained on another world: its tokenizer has no {', '.join(missing[:5])}; train one with "
                "`python -m training`, or leave --model out"
            )
        transformers_logging.disable_progress_bar()  # a bar for 0.1 MB only clutters the start
        encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
        encoder.train(False)
        torch.nn.Module.to(encoder, device)
        return cls(tokenizer, encoder)

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        return prompts.read(prompt, previous)

    def encode(self, text: str) -> Tensor:
        """Embeddings `[tokens, width]` of one text, as many tokens as the tokenizer pads to."""
        with torch.inference_mode():
            return self.embed(self.tokens([text]))[0]

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Token ids `[N, tokens]`, zero where padded."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        return torch.tensor(rows, device=self.encoder.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings `[N, tokens, width]`; padding is zero, as in Wan."""
        mask = (ids != 0).long()
        hidden: Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden * mask.unsqueeze(-1).to(hidden.dtype)
