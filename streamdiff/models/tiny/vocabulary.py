"""What single words mean: the table `words.txt`, plurals, typing mistakes. Knows nothing about scenes as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parent / "words.txt"
FILLERS = frozenset(
    word
    for line in (
        "a an the is are be its don isn let of and or to in on over at with this then there here while into from by",
        "for as i you we me my your want would should must may might like please show see give draw some very really",
        "more bit lot quite so just can could will not does has have having but if when where which who what against",
        "through under above below behind beside between near next across around along during off out onto upon one",
        "ones picture image video scene background weather camera speed size shape coloured colored thing things",
        "object objects shapes beautiful nice cute lovely pretty happy sad funny cool new old direction side towards",
        "toward middle centre center screen that about how much back instead again starts start begins begin place",
        "starting light lighter off way other than get gets become keep keeps let lets please thanks yes teh",
        "adn hte",
    )
    for word in line.split()
)
"""Words that may stand in a prompt and say nothing of their own."""


@dataclass(frozen=True)
class Meaning:
    """What a word or phrase says: (field, value) pairs; `exact` is False where it is only the nearest thing known."""

    says: tuple[tuple[str, str], ...]
    exact: bool


@dataclass(frozen=True)
class Word:
    """A piece of a prompt: its words as typed, the entry that was found (after plural and spelling), and its meaning.

    `meaning` is None for fillers and for what is not known (`known` tells them apart). `many`: a plural.
    """

    typed: str
    entry: str
    meaning: Meaning | None
    known: bool = True
    many: bool = False

    @property
    def misspelt(self) -> bool:
        return self.known and not self.many and self.typed != self.entry

    def values(self, field: str) -> list[str]:
        return [value for name, value in self.meaning.says if name == field] if self.meaning else []


def _lines(text: str) -> Iterator[tuple[str, str, str]]:
    for line in text.splitlines():
        if line.startswith(("=", "~")):
            meaning, _, words = line[1:].partition(":")
            yield line[0], meaning, words


@cache
def table() -> dict[str, Meaning]:
    """Every word and phrase of `words.txt` (a phrase with single spaces), and what it says."""
    found: dict[str, Meaning] = {}
    for kind, meaning, words in _lines(TABLE.read_text(encoding="utf-8")):
        says = []
        for part in meaning.split(","):
            field, value = part.split()
            says.append((field, value))
        for word in words.split():
            entry = word.replace("_", " ").replace("-", " ")
            if entry in found:
                raise ValueError(f"words.txt says {entry!r} twice")
            found[entry] = Meaning(tuple(says), kind == "=")
    return found


@cache
def apart() -> frozenset[str]:
    """Words that are no typing mistakes, although they look like it."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return frozenset(word for line in lines if line.startswith("-") for word in line[1:].replace(":", "").split())


@cache
def _longest() -> int:
    return max(len(entry.split()) for entry in table())


def words_of(text: str) -> list[str]:
    """Lower-case words of a text and commas; other punctuation, digits and symbols separate."""
    return re.findall(r"[a-z]+|,", re.sub(r"['\u2019]s\b", "", text.lower()))


def singular(word: str) -> str | None:
    """The entry of which `word` is the plural."""
    for ending, instead in (("ies", "y"), ("ves", "f"), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) >= len(ending) + 2:
            entry = word.removesuffix(ending) + instead
            if entry in table():
                return entry
    return None


def distance(one: str, other: str, most: int) -> int:
    """Edits (insert, delete, replace, swap neighbours) between two words; more than `most` may be said as most + 1."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before, last = list(range(len(other) + 1)), list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
        if min(row) > most:
            return most + 1
    return last[-1]


@cache
def spelt(word: str) -> str | None:
    """The known single word that was probably meant: one edit away, or two in words of eight letters and more. Short
    words are taken for no word of the table that has only a nearest meaning: too many are one edit away."""
    if len(word) < 4 or len(word) > 20 or word in apart():
        return None
    most = 2 if len(word) >= 8 else 1
    best: tuple[int, bool, str] | None = None
    for entry, meaning in table().items():
        if not meaning.exact and len(word) < 6:
            continue
        if " " in entry or len(entry) < 3 or (entry[0] != word[0] and entry[1:2] != word[1:2]):
            continue
        edits = distance(word, entry, most)
        if edits <= most:
            candidate = (edits, not meaning.exact, entry)
            best = candidate if best is None else min(best, candidate)
    return best[2] if best else None


def read_words(prompt: str) -> list[Word]:
    """The prompt as pieces, longest phrases first."""
    typed = words_of(prompt)[:200]
    pieces: list[Word] = []
    index = 0
    while index < len(typed):
        for length in range(min(_longest(), len(typed) - index), 0, -1):
            phrase = " ".join(typed[index : index + length])
            piece = _piece(phrase) if length == 1 else _phrase(phrase)
            if piece is not None:
                pieces.append(piece)
                index += length
                break
    return pieces


def _phrase(phrase: str) -> Word | None:
    meaning = table().get(phrase)
    return Word(phrase, phrase, meaning) if meaning else None


def _piece(word: str) -> Word:
    if word in table():
        return Word(word, word, table()[word])
    if word in FILLERS or len(word) < 3:
        return Word(word, word, None)
    entry = singular(word)
    if entry is not None:
        return Word(word, entry, table()[entry], many=True)
    entry = spelt(word)
    if entry is not None:
        return Word(word, entry, table()[entry])
    return Word(word, word, None, known=False)
