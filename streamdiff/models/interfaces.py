"""What the pipeline and the engine need of a model. Pure: weights are held, a stream's state is an argument.

Imports no torch, so that whoever only plans can ask for a model's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """How a model understood a prompt: `text` is what it is given, `notice` a remark for the user (or empty)."""

    text: str
    notice: str = ""


class TextEncoder(Protocol):
    """Prompt to conditioning. `slow` says that `encode` may take longer than a frame is shown: it is then called on a
    thread of its own, while streams go on and `read` is called on theirs."""

    examples: tuple[str, ...]
    vocabulary: str
    slow: bool

    def read(self, prompt: str, previous: str | None) -> Reading:
        """Understand a prompt; `previous` is the text in force, which fills what the new prompt leaves open."""

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]` of a text that `read` returned; T is the model's fixed text length."""


class StreamDecoder(Protocol):
    """Latents to frames, in any pieces: decoding a stream in pieces gives the frames of decoding it whole.

    What a stream remembers is the decoder's own type; everyone else only carries it. `temporal`: frames of each latent
    frame but a stream's first, which may have fewer.
    """

    temporal: int

    def new_memory(self) -> Any:
        """The memory of a stream that has not begun."""

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes that the memory of a running stream has, for latents of `height` x `width`."""

    def decode(self, latents: Tensor, memory: Any) -> Tensor:
        """Normalised latents `[1, C, F, h, w]` to frames uint8 `[n, H, W, 3]`. Mutates: memory."""
