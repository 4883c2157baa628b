"""The language of the world: what any prompt changes in the picture, and what people are told about it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.models.tiny import prompts
from streamdiff.models.tiny.scene import SETTING_TABLES, THING_TABLES, Scene, Thing
from training.embedded import TEXT_TOKENS, UNKNOWN
from training.model_folder import build_text
from training.world.scenes import random_scene

TEXT = build_text()
MEANINGS = prompts.word_table().meanings
scenes = st.integers(0, 100_000).map(lambda seed: random_scene(random.Random(seed)))
TWO = Scene(Thing(), Thing("blue", "star", "down"), place="sea")


def after(prompt: str, before: Scene | None = None) -> Scene:
    """What is shown after `prompt`."""
    return prompts.scene_of(prompts.read(prompt, prompts.canonical(before) if before else None).text)


@given(scenes, st.one_of(st.none(), scenes))
def test_its_own_sentence_is_understood_whatever_was_shown_before(scene: Scene, before: Scene | None) -> None:
    text = prompts.canonical(scene)
    assert prompts.read(text, prompts.canonical(before) if before else None).text == text
    assert prompts.read(text, None).notice == ""
    assert prompts.scene_of(text) == scene


@given(scenes)
def test_every_sentence_fits_the_tokenizer(scene: Scene) -> None:
    text = prompts.canonical(scene)
    encoding = TEXT.tokenizer.encode(text)
    assert UNKNOWN not in encoding.tokens
    assert len(text.replace(",", " , ").split()) <= TEXT_TOKENS


def test_short_words_are_not_taken_for_others_that_are_only_near() -> None:
    assert "“zoom”" in prompts.read("zoom in", None).notice
    assert after("zoom in", TWO) == TWO


def test_what_has_nothing_near_is_named() -> None:
    reading = prompts.read("a red zorgblatt moving left", None)
    assert "“zorgblatt”" in reading.notice
    assert prompts.scene_of(reading.text) == Scene(Thing(motion="left"))


@pytest.mark.parametrize("prompt", ["🐉🐉🐉", "", "ein zwölfeckiges Etwas", "123 !? ..."])
def test_nothing_known_at_all_keeps_the_picture_and_says_so(prompt: str) -> None:
    text = prompts.canonical(TWO)
    reading = prompts.read(prompt, text)
    assert reading.text == text and "can't draw" in reading.notice


def test_the_table_is_small_and_says_only_what_there_is() -> None:
    assert prompts.TABLE.stat().st_size < 300_000
    tables = {**THING_TABLES, **SETTING_TABLES}
    for entry, (says, _) in MEANINGS.items():
        for name, value in says.items():
            assert name not in tables or value in tables[name], entry
    lines = [line for line in prompts.TABLE.read_text("utf-8").splitlines() if line.startswith(("=", "~"))]
    assert sum(len(line.partition(":")[2].split()) for line in lines) == len(MEANINGS) > 800, "a word is there twice"


@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(st.sampled_from([*sorted(MEANINGS), "zorg", "🔥", ","]), max_size=30).map(" ".join),
    ),
    st.one_of(st.none(), st.text(max_size=40), scenes.map(prompts.canonical)),
)
def test_any_text_becomes_a_sentence_that_reads_as_itself(prompt: str, previous: str | None) -> None:
    reading = prompts.read(prompt, previous)
    assert prompts.canonical(prompts.scene_of(reading.text)) == reading.text
    assert prompts.read(reading.text, None) == prompts.ParsedPrompt(reading.text)
    assert prompts.read(prompt, previous) == reading


def test_a_long_prompt_gets_a_short_answer() -> None:
    long = " ".join(f"nonsense{'x' * i}" for i in range(60))[:2000]
    assert len(prompts.read(f"a red circle moving right over a meadow {long}", None).notice) < 1000


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
