"""Text encoder of the 256 pixel world: today's, with another language."""

from __future__ import annotations

from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.models.tiny.text_encoder import TinyText, build_encoder, build_tokenizer
from streamdiff.models.tiny.world256 import prompts

LANGUAGE = "world256"
"""What `model_index.json` calls this language."""
TEXT_TOKENS = 32


class WorldText(TinyText):
    """The `TextEncoder` (models/interfaces.py) that understands people."""

    examples = prompts.EXAMPLES
    suggestions = prompts.SUGGESTIONS
    vocabulary = prompts.VOCABULARY

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        return prompts.read(prompt, previous)


ENCODERS: dict[str, type[TinyText]] = {LANGUAGE: WorldText}
"""By the language that a model's `model_index.json` names; without one it is `TinyText`."""


def build_text() -> WorldText:
    """An untrained one."""
    tokenizer = build_tokenizer(prompts.known_words(), TEXT_TOKENS)
    return WorldText(tokenizer, build_encoder(tokenizer.get_vocab_size()))
