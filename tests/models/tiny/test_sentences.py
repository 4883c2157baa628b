"""Three hundred things that people type (`ordinary_prompts.txt`), and what each shows and says."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamdiff.models.tiny import prompts

LINES = [
    line
    for line in Path(__file__).with_name("ordinary_prompts.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_what_people_type_shows_what_they_mean(line: str) -> None:
    shown, _, says = line.partition(" | ")
    typed, _, sentence = shown.partition(" = ")
    reading = None
    for prompt in typed.split(" > "):
        reading = prompts.read(prompt, reading and reading.text)
    assert reading is not None and reading.text == sentence
    assert reading.notice == "" if says == "-" else says.lower() in reading.notice.lower()


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("a storm in the park", "“storm”: I draw rain. “park”: I draw a meadow."),
        ("a red star on the left", "“on the left”: I cannot choose where things are"),
        ("the camera follows", "it follows nothing"),
        ("do you know zorgblatts", "This small model can't draw “know”, “zorgblatts”."),
        ("bleu circle", "“bleu”: I read “blue”."),
    ],
)
def test_what_people_are_told(typed: str, told: str) -> None:
    assert told in prompts.read(typed, None).notice


def test_english_words_are_not_taken_for_typing_mistakes() -> None:
    for word in ("know", "hand", "stand", "find", "good", "light", "start", "neon", "hair", "galloping", "dessert"):
        assert not prompts.read_words(word)[0].misspelt, word
