"""The language of the embedded model: what a prompt changes in the picture, and the sentence that the model is given.

Every prompt is turned into one sentence of a fixed form (`canonical`), the only one that the model is trained on. Pure
text; knows nothing about tensors.
"""

from __future__ import annotations

from dataclasses import fields

from streamdiff.models.interfaces import ParsedPrompt
from streamdiff.models.tiny.requests import DEFAULT, Group, Request, apply, parse
from streamdiff.models.tiny.scene import (
    COLOR_NAMES,
    SETTING_TABLES,
    SHAPES,
    THING_TABLES,
    Scene,
    Thing,
)
from streamdiff.models.tiny.vocabulary import Word

MOTION_WORDS = {
    "left": "moving left",
    "right": "moving right",
    "up": "moving up",
    "down": "moving down",
    "still": "standing still",
    "bouncing": "bouncing",
    "spinning": "spinning",
}
SPEED_WORDS = {"slow": " slowly", "normal": "", "fast": " fast"}
PLACE_WORDS = {
    "meadow": "over a meadow",
    "desert": "in the desert",
    "sea": "over the sea",
    "sky": "in the sky",
    "city": "in the city",
}
HOUR_WORDS = {
    "day": "",
    "dusk": " at dusk",
    "night": " at night",
    "dawn": " at dawn",
    "passing": " as day turns into night",
}
WEATHER_WORDS = {"clear": "", "rain": " in the rain", "snow": " in the snow", "wind": " in the wind"}
CAMERA_WORDS = {"still": "", "left": ", camera panning left", "right": ", camera panning right"}

EXAMPLES = (
    "a red circle moving right over a meadow",
    "a blue star moving up and a small yellow heart bouncing in the city at night",
    "a white heart moving left slowly over the sea at dusk, camera panning right",
    "a purple square spinning in the desert as day turns into night",
    "an orange star bouncing fast over a meadow in the snow",
)
SUGGESTIONS = (
    COLOR_NAMES,
    SHAPES,
    ("moving left", "moving up", "bouncing", "spinning", "standing still"),
    ("faster", "slower", "larger", "smaller"),
    tuple(PLACE_WORDS.values()),
    ("by day", "at dusk", "at night", "at dawn", "as day turns into night"),
    ("rain", "snow", "wind", "clear weather"),
    ("camera panning left", "camera panning right", "still camera"),
)
VOCABULARY = (
    f"one or two things; colours {', '.join(COLOR_NAMES)}; shapes {', '.join(SHAPES)}, large or small; moving left, "
    "right, up or down, standing still, bouncing, spinning, slowly or fast; over a meadow, in the desert, over the "
    "sea, in the sky, in the city; by day, at dusk, at night, at dawn or as day turns into night; rain, snow, "
    "wind; the camera panning left or right"
)
CANNOT = {
    "place": "I cannot choose where things are, only where they go",
    "follow": "the camera pans or stands still, it follows nothing",
}
"""What people ask for that the world does not have, by the value of `cannot` in words.txt."""
MOST_REMARKS = 4
_DRAWN = {
    "motion": {name: f"it {words}" for name, words in MOTION_WORDS.items()},
    "place": {"meadow": "a meadow", "desert": "a desert", "sea": "the sea", "sky": "the sky", "city": "a city"},
    "hour": {"day": "daylight", "dusk": "dusk", "night": "night", "dawn": "dawn", "passing": "time that passes"},
    "weather": {"clear": "clear weather", "rain": "rain", "snow": "snow", "wind": "wind"},
    "camera": {"still": "a still camera", "left": "the camera panning left", "right": "the camera panning right"},
}
"""How people are told what is drawn for a word that has only a nearest meaning."""


def canonical(scene: Scene) -> str:
    """The sentence for `scene`. What a prompt means unless it says otherwise (large, by day, ...) is left out."""
    things = " and ".join(_thing(thing) for thing in scene.things)
    where = PLACE_WORDS[scene.place] + HOUR_WORDS[scene.hour] + WEATHER_WORDS[scene.weather]
    return f"{things} {where}{CAMERA_WORDS[scene.camera]}"


def _thing(thing: Thing) -> str:
    size = "small " if thing.size == "small" else ""
    article = "an" if (size or thing.color)[0] in "aeiou" else "a"
    speed = "" if thing.motion == "still" else SPEED_WORDS[thing.speed]
    return f"{article} {size}{thing.color} {thing.shape} {MOTION_WORDS[thing.motion]}{speed}"


def known_words() -> list[str]:
    """Every word of the sentences, sorted: the tokenizer's vocabulary."""
    tables = (MOTION_WORDS, SPEED_WORDS, PLACE_WORDS, HOUR_WORDS, WEATHER_WORDS, CAMERA_WORDS)
    phrases = [phrase for table in tables for phrase in table.values()]
    plain_words = (*COLOR_NAMES, *SHAPES, "a", "an", "and", "small", ",")
    return sorted({word for phrase in (*phrases, *plain_words) for word in phrase.replace(",", " , ").split()})


def scene_of(text: str) -> Scene:
    """The scene that a sentence of `canonical`, or any other text, stands for."""
    return apply(parse(text), DEFAULT)


def read(prompt: str, previous: str | None) -> ParsedPrompt:
    """Turn any prompt into the sentence for what it means, when `previous` (a text that `read` returned) is in force.

    The notice says what was understood otherwise than typed, what was not understood, and what stays as it was.
    """
    before = scene_of(previous) if previous else DEFAULT
    request = parse(prompt)
    scene = apply(request, before)
    text = canonical(scene)
    remarks = _remarks(request, scene)
    strange = list(dict.fromkeys(f"“{piece.typed[:24]}”" for piece, _ in request.pieces if not piece.known))
    if request.empty:
        named = f" ({', '.join(strange[:4])})" if strange else ""
        nothing = "" if remarks else f"This small model can't draw that{named}. "
        remark = " ".join(remarks) + " " if remarks else ""
        return ParsedPrompt(text, f"{remark}{nothing}It can draw {VOCABULARY}. Showing “{text}”.")
    shapes = sum(bool(piece.values("shape")) for piece, _ in request.pieces)
    if shapes > 2 or (request.add and before.second):
        remarks.append("I draw two things at most.")
    if strange:
        remarks.append(f"This small model can't draw {', '.join(strange[:4])}. It can draw {VOCABULARY}.")
    if " ".join(prompt.lower().split()) == text:
        return ParsedPrompt(text)
    remarks.append(f"Showing “{text}”.")
    return ParsedPrompt(text, " ".join(remarks))


def _remarks(request: Request, scene: Scene) -> list[str]:
    """What was understood otherwise than typed, each word once, `MOST_REMARKS` at most."""
    remarks: dict[str, str] = {}
    for piece, group in request.pieces:
        word = piece.typed[:24]
        if piece.misspelt:
            remarks[word] = f"“{word}”: I read “{piece.entry}”."
        for value in piece.values("cannot"):
            remarks[word] = f"“{word}”: {CANNOT[value]}."
        if piece.meaning and not piece.meaning.exact and (nearest := _nearest(piece, group, request, scene)):
            remarks[word] = f"“{word}”: I draw {nearest}."
    for color in request.uncolored:
        remarks[color] = f"“{color}”: only things have a color that can be chosen."
    return list(remarks.values())[:MOST_REMARKS]


def _nearest(piece: Word, group: Group, request: Request, scene: Scene) -> str:
    """What is drawn for a word that has only a nearest meaning; empty where other words of the prompt decided."""
    assert piece.meaning is not None
    won = {
        name: value
        for name, value in piece.meaning.says
        if (request.setting.get(name) if name in SETTING_TABLES else group.named.get(name)) == value
        and name not in (request.certain if name in SETTING_TABLES else group.says)
    }
    if "shape" in won:
        things = scene.things if group is request.groups[0] else scene.things[::-1]
        alike = [thing for thing in things if thing.shape == won["shape"]]
        named = [thing for thing in alike if thing.color == group.named.get("color", thing.color)]
        for thing in [*named, *alike][:1]:
            return f"{'an' if thing.color[0] in 'aeiou' else 'a'} {thing.color} {thing.shape}"
    return " and ".join(_DRAWN[name][value] if name in _DRAWN else value for name, value in won.items())


assert {f.name for f in fields(Thing)} == set(THING_TABLES)
