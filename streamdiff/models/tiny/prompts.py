"""The language of the embedded model: which words it knows, how it reads a prompt, how training captions are drawn.

Pure text; knows nothing about tensors.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, fields, replace

from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.models.tiny.world import BACKGROUNDS, COLOR_NAMES, MOTION_NAMES, SHAPES, Scene

DEFAULT = Scene("red", "circle", "right", "meadow")

SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "ball", "disc"),
    "square": ("square", "box", "block"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
}
MOTION_PHRASES: dict[str, tuple[str, ...]] = {
    "left": ("moving left", "drifting left", "gliding left", "flying to the left", "going left"),
    "right": ("moving right", "drifting right", "gliding right", "flying to the right", "going right"),
    "up": ("moving up", "rising", "floating up", "flying up", "going up"),
    "down": ("moving down", "falling", "sinking", "flying down", "going down"),
    "still": ("standing still", "resting", "staying still", "not moving"),
}
PLACE_PHRASES: dict[str, tuple[str, ...]] = {
    "night": ("at night", "in the night sky", "under the stars", "under the moon"),
    "sky": ("in the sky", "in the blue sky", "among clouds", "in the clouds"),
    "meadow": ("over a meadow", "in the meadow", "on a meadow", "over green hills"),
    "desert": ("in the desert", "over the desert", "over sand dunes", "on the dunes"),
    "sunset": ("at sunset", "over the sea at sunset", "over the sea", "by the sea"),
}
# Words that settle an attribute when no phrase above is found.
_LOOSE: dict[str, dict[str, tuple[str, ...]]] = {
    "motion": {
        "left": ("left", "leftwards"),
        "right": ("right", "rightwards"),
        "up": ("up", "upwards", "rises"),
        "down": ("down", "downwards", "falls", "sinks"),
        "still": ("still", "rests", "standing", "stands"),
    },
    "background": {
        "night": ("night", "moon", "stars", "starry"),
        "sky": ("blue sky", "sky", "clouds", "cloud", "cloudy"),
        "meadow": ("meadow", "hills", "grass", "field"),
        "desert": ("desert", "dunes", "sand"),
        "sunset": ("sunset", "sea", "ocean", "evening"),
    },
}
_FILLERS = frozenset(("a", "an", "the", "is", "it", "of", "and", "to", "in", "on", "over", "at", "with", "that", "now"))

EXAMPLES = (
    "a red circle moving right over a meadow",
    "a blue star rising at night",
    "a white heart drifting left at sunset",
    "a purple square falling in the desert",
    "a yellow triangle standing still in the clouds",
)
SUGGESTIONS = (
    COLOR_NAMES,
    SHAPES,
    tuple(phrases[0] for phrases in MOTION_PHRASES.values()),
    tuple(phrases[0] for phrases in PLACE_PHRASES.values()),
)
VOCABULARY = (
    f"colours {', '.join(COLOR_NAMES)}; shapes {', '.join(SHAPES)}; "
    "moving left, right, up, down or standing still; "
    "over a meadow, at night, in the sky, in the desert, at sunset"
)


def words_of(text: str) -> list[str]:
    """Lower-case words of a text; punctuation, digits and symbols separate."""
    return re.findall(r"[a-z]+", text.lower())


def canonical(scene: Scene) -> str:
    """The plainest sentence that says `scene`."""
    motion, place = MOTION_PHRASES[scene.motion][0], PLACE_PHRASES[scene.background][0]
    return f"{_article(scene.color)} {scene.color} {scene.shape} {motion} {place}"


def caption(scene: Scene, chance: random.Random) -> str:
    """A training caption: one of the many ways to say `scene`."""
    motion = chance.choice(MOTION_PHRASES[scene.motion])
    place = chance.choice(PLACE_PHRASES[scene.background])
    thing = f"{_article(scene.color)} {scene.color} {chance.choice(SHAPE_WORDS[scene.shape])}"
    if chance.random() < 0.2:
        return f"{place} {thing} {motion}"
    return f"{thing} {motion} {place}"


def known_words() -> list[str]:
    """Every word of the captions, sorted: the tokenizer's vocabulary."""
    phrases = [p for table in (SHAPE_WORDS, MOTION_PHRASES, PLACE_PHRASES) for group in table.values() for p in group]
    return sorted({word for phrase in (*phrases, *COLOR_NAMES, "a", "an") for word in phrase.split()})


@dataclass(frozen=True)
class Parsed:
    """What a prompt states, by fields of `Scene`, and the words that were not understood."""

    said: dict[str, str]
    unknown: tuple[str, ...]


def parse(prompt: str) -> Parsed:
    """Find the four attributes in free text.

    Longer phrases first, and a word says one thing only: "blue sky" is a place and no colour, nor is a star where the
    prompt says "under the stars".
    """
    words = words_of(prompt)
    used = [False] * len(words)
    found = {
        "background": _take(words, used, PLACE_PHRASES) or _take(words, used, _LOOSE["background"]),
        "motion": _take(words, used, MOTION_PHRASES) or _take(words, used, _LOOSE["motion"]),
        "color": _take(words, used, {name: (name,) for name in COLOR_NAMES}),
        "shape": _take(words, used, {name: (*forms, *(f"{f}s" for f in forms)) for name, forms in SHAPE_WORDS.items()}),
    }
    known = set(known_words()) | {w for table in _LOOSE.values() for forms in table.values() for w in forms}
    unknown = [word for word, done in zip(words, used, strict=True) if not done and word not in known | _FILLERS]
    return Parsed({name: value for name, value in found.items() if value}, tuple(dict.fromkeys(unknown)))


def read(prompt: str, previous: str | None) -> ParsedPrompt:
    """Turn any prompt into a caption the model was trained on.

    A prompt in the model's own words is passed on as it is. Otherwise what the prompt leaves open is taken from
    `previous` (the text in force), and the notice says so, kindly, with the list of what the model knows.
    """
    found = parse(prompt)
    before = replace(DEFAULT, **parse(previous).said) if previous else DEFAULT
    scene = replace(before, **found.said)
    if len(found.said) == len(fields(Scene)) and not found.unknown:
        own = " ".join(words_of(prompt))
        text = own if own in _all_captions(scene) else canonical(scene)
        return ParsedPrompt(text)
    text = canonical(scene)
    if not found.said:
        return ParsedPrompt(text, f"I did not find anything I can draw in that. I know {VOCABULARY}. Showing “{text}”.")
    if found.unknown:
        strange = ", ".join(f"“{word[:24]}”" for word in found.unknown[:4])
        return ParsedPrompt(text, f"I do not know {strange}. I know {VOCABULARY}. Showing “{text}”.")
    return ParsedPrompt(text, f"Showing “{text}”: what you left open stays as it was.")


def _article(color: str) -> str:
    return "an" if color[0] in "aeiou" else "a"


def _take(words: list[str], used: list[bool], table: dict[str, tuple[str, ...]]) -> str | None:
    """The attribute whose longest phrase of unused words occurs first; marks the phrase's words. Mutates: used."""
    best: tuple[int, int, str] | None = None
    for name, phrases in table.items():
        for phrase in phrases:
            parts = phrase.split()
            for start in range(len(words) - len(parts) + 1):
                end = start + len(parts)
                if words[start:end] == parts and not any(used[start:end]):
                    candidate = (-len(parts), start, name)
                    best = candidate if best is None else min(best, candidate)
                    break
    if best is None:
        return None
    for index in range(best[1], best[1] - best[0]):
        used[index] = True
    return best[2]


def _all_captions(scene: Scene) -> set[str]:
    """Every caption training draws for `scene`."""
    captions = set()
    for motion in MOTION_PHRASES[scene.motion]:
        for place in PLACE_PHRASES[scene.background]:
            for form in SHAPE_WORDS[scene.shape]:
                thing = f"{_article(scene.color)} {scene.color} {form}"
                captions |= {f"{thing} {motion} {place}", f"{place} {thing} {motion}"}
    return captions


assert set(SHAPE_WORDS) == set(SHAPES) and set(MOTION_PHRASES) == set(MOTION_NAMES)
assert set(PLACE_PHRASES) == set(BACKGROUNDS)
