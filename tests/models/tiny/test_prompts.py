"""The embedded model's language: what a prompt is taken to say."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.models.tiny import prompts, world
from streamdiff.models.tiny.text_encoder import TEXT_TOKENS, UNKNOWN, build_tokenizer

TOKENIZER = build_tokenizer()
COMPLETE = "a red circle moving right over a meadow"

TABLE = [
    ("a blue star rising at night", ("blue", "star", "up", "night")),
    ("A BLUE STAR, rising; at night!", ("blue", "star", "up", "night")),
    ("at sunset a white heart drifting left", ("white", "heart", "left", "sunset")),
    ("a green ball flying to the right in the blue sky", ("green", "circle", "right", "sky")),
    ("blue sky with a red circle going down", ("red", "circle", "down", "sky")),
    ("an orange box falling on the dunes", ("orange", "square", "down", "desert")),
    ("a yellow star under the stars, not moving", ("yellow", "star", "still", "night")),
    ("hearts", (None, "heart", None, None)),
    ("purple", ("purple", None, None, None)),
    ("to the left", (None, None, "left", None)),
    ("ocean", (None, None, None, "sunset")),
    ("🔴🔵 ⭐️", (None, None, None, None)),
    ("ein roter Kreis", (None, None, None, None)),
    ("123 !? ...", (None, None, None, None)),
    ("a red🔥circle", ("red", "circle", None, None)),
    ("赤い丸", (None, None, None, None)),
]


@pytest.mark.parametrize(("prompt", "expected"), TABLE, ids=[prompt[:20] for prompt, _ in TABLE])
def test_what_a_prompt_says(prompt: str, expected: tuple[str | None, ...]) -> None:
    found = prompts.parse(prompt)
    names = ("color", "shape", "motion", "background")
    assert found.said == {name: value for name, value in zip(names, expected, strict=True) if value}


@pytest.mark.parametrize("prompt", prompts.EXAMPLES)
def test_the_examples_are_understood_as_they_are(prompt: str) -> None:
    assert prompts.read(prompt, None) == prompts.ParsedPrompt(prompt)


def test_every_scene_can_be_said_and_is_understood() -> None:
    chance = random.Random(0)
    for scene in world.all_scenes()[::2]:
        for text in (prompts.canonical(scene), prompts.caption(scene, chance)):
            found = prompts.parse(text)
            assert found.said == asdict(scene), text
            assert prompts.read(text, None) == prompts.ParsedPrompt(text)


def test_captions_fit_the_tokenizer() -> None:
    chance = random.Random(1)
    for scene in world.all_scenes():
        for _ in range(4):
            encoding = TOKENIZER.encode(prompts.caption(scene, chance))
            assert UNKNOWN not in encoding.tokens
            assert len(prompts.caption(scene, chance).split()) <= TEXT_TOKENS


def test_what_is_left_open_stays_as_it_was() -> None:
    reading = prompts.read("blue", previous="at night a yellow star rising")
    assert reading.text == prompts.canonical(world.Scene("blue", "star", "up", "night"))
    assert "stays as it was" in reading.notice


def test_without_a_previous_text_the_default_scene_fills() -> None:
    assert prompts.read("blue", None).text == prompts.canonical(world.Scene("blue", "circle", "right", "meadow"))


def test_unknown_words_are_named_and_the_vocabulary_listed() -> None:
    reading = prompts.read("a red dragon moving left at night", previous=None)
    assert reading.text == prompts.canonical(world.Scene("red", "circle", "left", "night"))
    assert "“dragon”" in reading.notice and prompts.VOCABULARY in reading.notice
    for name in (*world.COLORS, *world.SHAPES):
        assert name in reading.notice


def test_nothing_known_at_all_gets_a_friendly_answer_and_keeps_the_picture() -> None:
    previous = prompts.canonical(world.Scene("green", "star", "down", "desert"))
    reading = prompts.read("🐉🐉🐉", previous)
    assert reading.text == previous
    assert prompts.VOCABULARY in reading.notice and previous in reading.notice


def test_a_long_prompt_gets_a_short_answer() -> None:
    long = " ".join(f"nonsense{'x' * i}" for i in range(60))[:2000]
    reading = prompts.read(f"a red circle moving right over a meadow {long}", None)
    assert reading.text == COMPLETE
    assert len(reading.notice) < 600
    assert prompts.read("red " * 500, None).text == prompts.read("red", None).text


@pytest.mark.slow
@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(st.sampled_from([*prompts.known_words(), "dragon", "🔥", "ÜBER"]), max_size=30).map(" ".join),
    ),
    st.one_of(st.none(), st.text(max_size=40), st.just("a blue star rising at night")),
)
def test_any_text_becomes_one_that_the_tokenizer_knows_and_that_reads_as_itself(
    prompt: str, previous: str | None
) -> None:
    reading = prompts.read(prompt, previous)
    encoding = TOKENIZER.encode(reading.text)
    assert UNKNOWN not in encoding.tokens
    assert 0 not in encoding.ids[: len(reading.text.split())], "the text fits without truncation"
    assert prompts.read(reading.text, None) == prompts.ParsedPrompt(reading.text)
    assert prompts.read(prompt, previous) == reading


@given(st.sampled_from(world.all_scenes()), st.sampled_from(world.COLOR_NAMES))
def test_naming_one_colour_changes_the_colour_and_nothing_else(scene: world.Scene, color: str) -> None:
    text = prompts.read(color, prompts.canonical(scene)).text
    assert text == prompts.canonical(world.Scene(color, scene.shape, scene.motion, scene.background))
