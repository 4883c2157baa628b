"""Protocols of a model's parts, as the pipeline and the engine use them. A part holds weights; a stream's state is an
argument.

Imports no torch, so that the planner can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParsedPrompt:
    """How a model understood a prompt: `text` is what it is given, `notice` a remark for the user (or empty)."""

    text: str
    notice: str = ""


class TextEncoder(Protocol):
    """Prompt to conditioning. `slow` says that `encode` may take longer than a frame is shown: it is then called on a
    thread of its own, while streams go on and `read` is called on theirs. `suggestions`: groups of short prompts that
    change one thing each and leave the rest as it is; empty where `read` fills nothing in."""

    examples: tuple[str, ...] = ()
    suggestions: tuple[tuple[str, ...], ...] = ()
    vocabulary: str = ""
    slow: bool = False

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        """Understand a prompt; `previous` is the text in force, which fills what the new prompt leaves open."""

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]` of a text that `read` returned; T is the model's fixed text length."""
