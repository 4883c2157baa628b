"""Prompts' embeddings in files of the user's cache folder, so that they outlive the process: a restart, and a spare
engine, ask the text encoder nothing that was asked before. Knows nothing about encoders."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from streamdiff.atomic_write import temporary_sibling

logger = logging.getLogger(__name__)

MAX_BYTES = 512 * 2**20
_TENSOR, _ROWS, _SUFFIX = "embeddings", "rows", ".safetensors"


class TextKey(NamedTuple):
    """What embeddings depend on: which encoder (its number format included), which revision of it, the text length in
    tokens, and the text."""

    encoder: str
    revision: str
    length: int
    text: str


class EmbeddingFolder:
    """Embeddings `[T, text_dim]` by key, one file each; those used longest ago go first. Several processes may use a
    folder at the same time. What cannot be read counts as not there, and what cannot be written is not kept.

    Only the user can read it: the folder has mode 0700, its files 0600. They hold no text, but who can read them and
    has the encoder can tell whether a text that he thinks of was asked for.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        """`folder` is made with the first file; by default `streamdiff/embeddings` in the user's cache folder
        (`XDG_CACHE_HOME`, else `~/.cache`)."""
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.folder = folder or Path(caches) / "streamdiff" / "embeddings"
        self.max_bytes = max_bytes
        self._writable = True

    def get(self, key: TextKey) -> Tensor | None:
        """The embeddings on the CPU, as they were put; None if they are not here. A damaged file is removed."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                kept, rows = file.get_tensor(_TENSOR), int((file.metadata() or {})[_ROWS])
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, ValueError):
            with contextlib.suppress(OSError):  # a folder that is only read
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        embeddings = torch.zeros(rows, *kept.shape[1:], dtype=kept.dtype)
        embeddings[: len(kept)] = kept
        return embeddings

    def put(self, key: TextKey, embeddings: Tensor) -> None:
        """Keep embeddings `[T, text_dim]`, without the zero rows at their end; drops others for room. Never raises for
        a disk that is full or cannot be written: says so once on standard error."""
        used = embeddings.any(1).nonzero()
        count = int(used[-1]) + 1 if len(used) else 0
        data = save({_TENSOR: embeddings[:count].contiguous().cpu()}, {_ROWS: str(len(embeddings))})
        if len(data) > self.max_bytes or not self._writable:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary_sibling(self._path(key)) as part:
                part.touch(mode=0o600)
                part.write_bytes(data)
                part.replace(self._path(key))
            self._drop()
        except OSError as error:
            self._writable = False
            logger.warning("note: prompts' embeddings are not kept on disk: %s", error)

    def _drop(self) -> None:
        """Remove what was used longest ago, until the rest fits."""
        found = []
        for path in self.folder.iterdir():
            try:
                state = path.stat()
            except FileNotFoundError:  # another process was quicker
                continue
            found.append((state.st_mtime_ns, state.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, key: TextKey) -> Path:
        return self.folder / (hashlib.sha256(repr(tuple(key)).encode()).hexdigest() + _SUFFIX)
