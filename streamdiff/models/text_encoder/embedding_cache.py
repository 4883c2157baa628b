"""Keeps prompts' embeddings, so that a text is encoded once. Bounded in bytes; for any `TextEncoder` and any thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.models.text_encoder.embedding_store import EmbeddingFolder, TextKey
from streamdiff.models.text_encoder.wan import WanText


class EmbeddingCache:
    """Embeddings by key; the least recently used go first. One cache may serve several encoders."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` of embeddings are kept at most; larger ones, and with 0 all, are handed out and not kept."""
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[TextKey, Tensor] = OrderedDict()
        self._under_way: dict[TextKey, Future[Tensor]] = {}

    def get(self, key: TextKey, encode: Callable[[], Tensor]) -> Tensor:
        """The embeddings of `key`, encoded now if they are not kept; if another thread is encoding them, its result.

        What is handed out is shared: it must not be written to. What `encode` raises goes to everybody who waits for
        it, and nothing is kept. Mutates: self.
        """
        with self._lock:
            if (kept := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return kept
            if (theirs := self._under_way.get(key)) is None:
                ours = self._under_way[key] = Future()
        return self._encode(key, encode, ours) if theirs is None else theirs.result()

    def _encode(self, key: TextKey, encode: Callable[[], Tensor], ours: Future[Tensor]) -> Tensor:
        try:
            embeddings = encode()
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            ours.set_exception(error)
            raise
        with self._lock:
            del self._under_way[key]
            self._keep(key, embeddings)
        ours.set_result(embeddings)
        return embeddings

    def _keep(self, key: TextKey, embeddings: Tensor) -> None:
        if _held_bytes(embeddings) > self.max_bytes:
            return
        self._entries[key] = embeddings
        while sum(map(_held_bytes, self._entries.values())) > self.max_bytes:
            self._entries.popitem(last=False)


class CachedText:
    """A `TextEncoder` (models/interfaces.py) that asks `encoder` only for texts that neither `cache` nor `kept`
    holds."""

    def __init__(self, encoder: WanText, cache: EmbeddingCache, kept: EmbeddingFolder | None = None) -> None:
        self.examples, self.suggestions = encoder.examples, encoder.suggestions
        self.vocabulary, self.slow = encoder.vocabulary, encoder.slow
        self.encoder, self.cache, self._kept = encoder, cache, kept

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        return self.encoder.read(prompt, previous)

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]`, shared: not to be written to."""
        key = self.encoder.key(text)
        return self.cache.get(key, lambda: self._find(key))

    def _find(self, key: TextKey) -> Tensor:
        if self._kept is not None and (found := self._kept.get(key)) is not None:
            return found.to(self.encoder.output)
        embeddings = self.encoder.encode(key.text)
        if self._kept is not None:
            self._kept.put(key, embeddings)
        return embeddings


def _held_bytes(embeddings: Tensor) -> int:
    """Of the whole memory behind it, which a view keeps alive."""
    return embeddings.untyped_storage().nbytes()
