"""The cache of embeddings: bounded in bytes, least recently used first, each text encoded once whoever asks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamdiff.models.spec import ParsedPrompt
from streamdiff.models.text_encoder import CachedText, EmbeddingCache, TextKey
from streamdiff.models.tiny.model import WEIGHTS, TinyText

ITEM_BYTES = 4


def key(text: str, encoder: str = "e", revision: str = "r", length: int = 8) -> TextKey:
    return TextKey(encoder, revision, length, text)


def make(size: int) -> Callable[[], Tensor]:
    return lambda: torch.full((size,), float(size))


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 20)), max_size=60),
)
def test_it_keeps_what_a_plain_model_of_it_keeps(bound: int, asked: list[tuple[str, int]]) -> None:
    """Sizes in numbers. A text always has the size of its first encoding that is kept."""
    cache = EmbeddingCache(bound * ITEM_BYTES)
    plain: OrderedDict[str, int] = OrderedDict()
    for text, size in asked:
        encoded: list[str] = []

        def encode(text: str = text, size: int = size, encoded: list[str] = encoded) -> Tensor:
            encoded.append(text)
            return torch.full((size,), float(size))

        got = cache.get(key(text), encode)
        assert encoded == ([] if text in plain else [text])
        if text in plain:
            plain.move_to_end(text)
        elif size <= bound:
            plain[text] = size
            while sum(plain.values()) > bound:
                plain.popitem(last=False)
        assert len(got) == plain.get(text, size)
        assert sizes(cache) == plain and sum(plain.values()) <= bound


def sizes(cache: EmbeddingCache) -> dict[str, int]:
    """How many numbers it keeps of each text, the least recently used first."""
    return {each.text: len(embeddings) for each, embeddings in cache._entries.items()}


def test_every_part_of_the_key_counts() -> None:
    cache = EmbeddingCache(1000)
    keys = [key("a"), key("b"), key("a", encoder="f"), key("a", revision="s"), key("a", length=9)]
    for size, each in enumerate(keys, start=1):
        cache.get(each, make(size))
    assert [len(cache.get(each, make(99))) for each in keys] == [1, 2, 3, 4, 5]


def test_a_view_counts_with_all_the_memory_it_keeps() -> None:
    cache = EmbeddingCache(50 * ITEM_BYTES)
    cache.get(key("view"), lambda: torch.zeros(10, 10)[0])
    assert not sizes(cache)


class Gate:
    """An encoder that says when it has begun, and goes on when it may."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls = 0
        self.error = error

    def __call__(self) -> Tensor:
        self.calls += 1
        self.begun.set()
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return torch.ones(3)


def ask(
    cache: EmbeddingCache, encode: Callable[[], Tensor], answers: list[object], times: int
) -> list[threading.Thread]:
    """So many threads that ask for the same text; each appends the embeddings or the error to `answers`."""

    def run() -> None:
        try:
            answers.append(cache.get(key("same"), encode))
        except ArithmeticError as error:
            answers.append(error)

    threads = [threading.Thread(target=run) for _ in range(times)]
    for thread in threads:
        thread.start()
    return threads


class CountingLock:
    """Counts how often it was held."""

    def __init__(self) -> None:
        self._lock, self.times = threading.Lock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.times += 1
        self._lock.release()


def counted(max_bytes: int) -> tuple[EmbeddingCache, CountingLock]:
    """A cache whose lock is held once by everyone who asks, and once more by who has encoded."""
    cache, lock = EmbeddingCache(max_bytes), CountingLock()
    cache._lock = lock  # type: ignore[assignment]
    return cache, lock


def wait_until_asked(lock: CountingLock, times: int) -> None:
    while lock.times < times:
        threading.Event().wait(0.001)


def test_a_text_asked_for_by_many_at_once_is_encoded_once() -> None:
    (cache, lock), gate = counted(100), Gate()
    answers: list[object] = []
    threads = ask(cache, gate, answers, 8)
    assert gate.begun.wait(30)
    wait_until_asked(lock, 8)
    assert len(cache.get(key("other"), make(2))) == 2, "another text does not wait"
    gate.go.set()
    for thread in threads:
        thread.join()
    assert gate.calls == 1 and len(answers) == 8
    assert len({id(answer) for answer in answers}) == 1
    assert sizes(cache) == {"other": 2, "same": 3}


def test_an_error_goes_to_all_who_wait_and_the_next_one_tries_again() -> None:
    (cache, lock), gate = counted(100), Gate(ArithmeticError("no ink"))
    answers: list[object] = []
    threads = ask(cache, gate, answers, 3)
    assert gate.begun.wait(30)
    wait_until_asked(lock, 3)
    gate.go.set()
    for thread in threads:
        thread.join()
    assert [str(answer) for answer in answers] == ["no ink"] * 3 and gate.calls == 1
    assert not sizes(cache)
    assert len(cache.get(key("same"), make(4))) == 4


def test_it_goes_around_a_text_encoder() -> None:
    encoder: Any = TinyText.load(WEIGHTS)
    changed: Any = TinyText.load(WEIGHTS)
    encoder.key, changed.key = partial(key, revision="1"), partial(key, revision="2")
    cache = EmbeddingCache(2**20)
    text, other = CachedText(encoder, cache), CachedText(changed, cache)
    reading = text.read("a red circle moving left", None)
    assert reading == encoder.read("a red circle moving left", None) and isinstance(reading, ParsedPrompt)
    assert (text.examples, text.vocabulary) == (encoder.examples, encoder.vocabulary)
    assert torch.equal(text.encode(reading.text), encoder.encode(reading.text))
    assert text.encode(reading.text) is text.encode(reading.text)
    assert other.encode(reading.text) is not text.encode(reading.text)
    assert {each.revision for each in cache._entries} == {"1", "2"}
