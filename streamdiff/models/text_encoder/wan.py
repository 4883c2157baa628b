"""Wan's text encoder: UMT5 and its tokenizer, from a diffusers folder or the original file (`wan_files`), with
embeddings as diffusers' WanPipeline has them: a fixed number of rows, zero beyond the text. Keeps no
embeddings; knows nothing about files given by a user, or sessions."""

from __future__ import annotations

import contextlib
import html
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import ftfy
import torch
from torch import Tensor
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.device import pick_dtype
from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.models.text_encoder import wan_files
from streamdiff.models.text_encoder.embedding_store import TextKey

TEXT_TOKENS = 512
EXAMPLES = (
    "A red fox trots through fresh snow at dawn, its breath visible, low sun between the pines. The camera follows it "
    "from the side at eye level.",
    "Waves break on black rocks under a stormy sky, spray in slow motion, a lighthouse in the distance, wide shot.",
    "A potter shapes a bowl on a turning wheel in a warm workshop, close-up of wet hands and clay, soft window light.",
)
VOCABULARY = (
    "Any words, in English or Chinese. One to three sentences that name the subject, what it does, the place, the "
    "light and the camera work best."
)
_LAST_WORDS = 8  # tokens of a cut prompt's end that a notice shows


class WanText:
    """Wan's `TextEncoder` (models/interfaces.py). For several threads; they encode one after the other."""

    examples: tuple[str, ...] = EXAMPLES
    suggestions: tuple[tuple[str, ...], ...] = ()
    vocabulary: str = VOCABULARY
    slow: bool = True

    def __init__(
        self,
        path: Path,
        *,
        length: int = TEXT_TOKENS,
        width: int | None = None,
        device: torch.device | str | None = None,
        output: torch.device | str | None = None,
    ) -> None:
        """Reads the tokenizer and the encoder's sizes; the weights come with the first text.

        Args:
            path: a model in diffusers' layout, or original Wan's: the folder, or the encoder's file.
            length: text tokens T that the model was trained with.
            width: text width that the transformer asks for; None: whatever the encoder has.
            device: where the encoder runs, in bfloat16 on a GPU, float32 on the CPU; None: on `output` where it takes a
                third of the free memory or less, else on the CPU.
            output: where embeddings are put; None: `device`, or the CPU.

        Raises:
            ConfigError: a part that is missing or cannot be read, or an encoder of another kind or width.
        """
        self.path, self.length = path, length
        self._files = wan_files.find(path)
        self.width, words = wan_files.read_sizes(self._files, width)
        self.output = torch.device(output or device or "cpu")
        self.device = wan_files.choose_device(self._files, self.output) if device is None else torch.device(device)
        self.dtype = pick_dtype("auto", self.device)
        self._identity = f"{path.resolve()} {self.dtype}"
        self.revision = wan_files.revision(self._files)
        self._tokenizer = wan_files.load_tokenizer(self._files.tokenizer, words)
        # Padding and truncation are settings of the tokenizer's own, so two threads must not use it at once.
        self._tokenizing, self._encoding = threading.Lock(), threading.Lock()
        self._encoder: UMT5EncoderModel | None = None

    @property
    def loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._encoder is not None

    def key(self, text: str) -> TextKey:
        """What tells the embeddings of `text` from others."""
        return TextKey(self._identity, self.revision, self.length, text)

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        """The prompt as it is; the notice says where it is cut if it is too long."""
        with self._tokenizing:
            ids = self._tokenizer(_clean(prompt), truncation=False, padding=False, verbose=False).input_ids
            if len(ids) <= self.length:
                return ParsedPrompt(prompt)
            kept = ids[: self.length - 1]  # the last one ends the text
            end = self._tokenizer.decode(kept[-_LAST_WORDS:]).strip()
        return ParsedPrompt(
            prompt,
            f"The prompt has {len(ids):,} tokens, and the model reads {self.length:,}: it ends for it after “…{end}”.",
        )

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, D]` of one text, `dtype`, on `output`; rows beyond the text are zero. Loads the weights if
        they are not there. On the CPU all cores take part.

        Only the text's own tokens are encoded: attention is masked and positions are relative, so their rows are those
        of a text padded to T tokens, which takes ten times as long.

        Raises:
            ConfigError: weights that are not those of the encoder.
            ValueError: the encoder gives values that are not finite.
        """
        tokens = self.tokens(text)
        with self._encoding:
            if self._encoder is None:
                self._encoder = wan_files.load_encoder(self._files, self.device, self.dtype)
            with torch.inference_mode(), _beside(self.device), _all_cores(self.device):
                ids = tokens.to(self.device)
                hidden = self._encoder(ids, torch.ones_like(ids)).last_hidden_state[0]
        if not bool(hidden.isfinite().all()):
            raise ValueError(f"the text encoder in {self.path} gave values that are not finite in {self.dtype}")
        embeddings = torch.zeros(self.length, self.width, dtype=self.dtype, device=self.output)
        embeddings[: len(hidden)] = hidden.to(self.output)
        return embeddings

    def tokens(self, text: str) -> Tensor:
        """The ids of the text cleaned and cut to T tokens, int64 `[1, n]`."""
        with self._tokenizing:
            found = self._tokenizer(_clean(text), max_length=self.length, truncation=True, padding=False, verbose=False)
        return torch.tensor([found.input_ids])

    def awaited_bytes(self, device: torch.device) -> int:
        """Bytes that the weights will take on `device` once loaded; 0 if they are loaded, or go to another device."""
        return 0 if self.loaded or self.device.type != device.type else self._files.values * self.dtype.itemsize


def _clean(text: str) -> str:
    """As diffusers and original Wan clean a prompt: broken encodings mended, entities resolved, white space simple."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a GPU, run on a stream of its own and wait for it on this thread, so that the transformer's work goes on."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@contextlib.contextmanager
def _all_cores(device: torch.device) -> Iterator[None]:
    """On the CPU, let torch use every core that this process may; afterwards as many threads as before. Other threads
    of the process that use torch already keep their own number."""
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, _cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
