"""The language of the embedded model: what a prompt changes in the picture, and the sentence that the model is given.

Every prompt is turned into one sentence of a fixed form (`canonical`), the only one that the model is trained on. Pure
text; knows nothing about tensors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace

from streamdiff.models.interfaces import Reading
from streamdiff.models.tiny.world256.scene import (
    COLOR_NAMES,
    SETTING_TABLES,
    SHAPES,
    SPEEDS,
    THING_TABLES,
    Scene,
    Thing,
)
from streamdiff.models.tiny.world256.vocabulary import Word, read_words

DEFAULT = Scene()
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
_OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
STARTS_OVER = 3
"""A prompt that says so much of color, shape, motion and place, with an article, describes a new picture."""


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


def plain(scene: Scene) -> Scene:
    """`scene` without what cannot be said: what stands still has no speed."""

    def settled(thing: Thing) -> Thing:
        return replace(thing, speed="normal") if thing.motion == "still" else thing

    return replace(scene, first=settled(scene.first), second=scene.second and settled(scene.second))


def draw(chance: random.Random) -> Scene:
    """A random scene that can be said."""

    def thing() -> Thing:
        return Thing(*(chance.choice(table) for table in THING_TABLES.values()))

    rest = {name: chance.choice(table) for name, table in SETTING_TABLES.items()}
    return plain(Scene(thing(), thing() if chance.random() < 0.5 else None, **rest))


def known_words() -> list[str]:
    """Every word of the sentences, sorted: the tokenizer's vocabulary."""
    tables = (MOTION_WORDS, SPEED_WORDS, PLACE_WORDS, HOUR_WORDS, WEATHER_WORDS, CAMERA_WORDS)
    phrases = [phrase for table in tables for phrase in table.values()]
    plain_words = (*COLOR_NAMES, *SHAPES, "a", "an", "and", "small", ",")
    return sorted({word for phrase in (*phrases, *plain_words) for word in phrase.replace(",", " , ").split()})


@dataclass
class _Group:
    """What a prompt says of one thing: fields of `Thing`, and how it speaks of it."""

    says: dict[str, str] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    article: bool = False
    two: bool = False


@dataclass
class _Request:
    """What a whole prompt says."""

    groups: list[_Group]
    setting: dict[str, str]
    pieces: list[Word]
    certain: set[str] = field(default_factory=set)
    """Of the setting what was said exactly."""
    add: bool = False
    remove: bool = False
    one: bool = False
    both: bool = False
    edit: bool = False
    target: dict[str, str] = field(default_factory=dict)
    """What is said of the thing that is to become another: "turn the circle into a heart"."""

    @property
    def empty(self) -> bool:
        told = any(group.says or group.implied or group.changes or group.two for group in self.groups)
        return not (told or self.setting or self.add or self.remove or self.one)


def parse(prompt: str) -> _Request:
    """Sort the prompt's words into what is said of things and of their setting."""
    pieces = read_words(prompt)
    request = _Request([], {}, pieces)
    for start, end in _spans(pieces):
        group = _Group()
        for piece in pieces[start:end]:
            _take(piece, group, request)
        request.groups.append(group)
    if len(request.groups) == 2 and (request.edit and any(piece.entry in ("into", "to") for piece in pieces)):
        request.target, request.edit = request.groups[0].says, True
        del request.groups[0]
    return request


def _spans(pieces: list[Word]) -> list[tuple[int, int]]:
    """Where the first and the second thing are spoken of: the prompt is cut once, before the second shape's words."""
    shapes = [index for index, piece in enumerate(pieces) if piece.values("shape")]
    if len(shapes) > 1:
        between = range(shapes[0] + 1, shapes[1])
        cuts = [
            index for index in between if pieces[index].entry in ("and", "with", "while", ",", "and another", "plus")
        ]
        begins = [i for i in between if pieces[i].entry in ("a", "an", "the") or pieces[i].values("color")]
        cut = (cuts or [*begins[:1], shapes[1]])[-1] if cuts else (begins or [shapes[1]])[0]
        return [(0, cut), (cut, len(pieces))]
    colors = [
        index for index, piece in enumerate(pieces) if piece.meaning and piece.meaning.exact and piece.values("color")
    ]
    if len(shapes) == 1 and pieces[shapes[0]].many and len(colors) == 2 and colors[1] < shapes[0]:
        return [(0, colors[1]), (colors[1], len(pieces))]  # "red and blue circles"
    return [(0, len(pieces))]


def _take(piece: Word, group: _Group, request: _Request) -> None:
    """Mutates: group, request."""
    if piece.entry in ("a", "an"):
        group.article = True
    if piece.meaning is None:
        return
    for name, value in piece.meaning.says:
        if name in THING_TABLES:
            (group.says if piece.meaning.exact else group.implied).setdefault(name, value)
            group.two |= name == "shape" and piece.many
        elif name in SETTING_TABLES and (piece.meaning.exact or name not in request.certain):
            request.setting[name] = value  # the last word counts
            request.certain |= {name} if piece.meaning.exact else set()
        elif name == "change":
            group.changes.append(value)
        elif name == "count" and value == "two":
            group.two = True
        elif name == "count":
            setattr(request, value, True)
        elif name == "refer":
            request.both |= value == "both"
            request.edit = True
        elif name == "edit":
            request.edit = True


def apply(request: _Request, before: Scene) -> Scene:
    """The scene after a request, when `before` was shown. What it leaves open stays, unless it describes a new one."""
    groups = [group for group in request.groups if group.says or group.implied or group.changes or group.two]
    if request.remove:
        return _removed(request, groups, before)
    fresh = _describes(request, groups)
    base = DEFAULT if fresh else before
    scene = _placed(base, request.setting)
    if not groups:
        return replace(scene, second=None) if request.one and not request.add else _more(request, scene)
    if len(groups) == 2:
        shared = groups[1].says if not groups[0].says.get("shape") else {}
        first = _changed(_Group({**shared, **groups[0].says}, groups[0].implied, groups[0].changes), base.first)
        second = _changed(groups[1], base.second or _beside(first))
        return plain(replace(scene, first=first, second=second))
    group = groups[0]
    if request.add:
        return plain(replace(scene, second=_changed(group, base.second or _beside(base.first))))
    if group.two:
        first = _changed(group, base.first)
        return plain(replace(scene, first=first, second=_changed(group, base.second or _beside(base.first))))
    if (
        base.second is None
        or request.one
        or (group.article and not request.edit and "shape" in group.says | group.implied)
    ):
        return plain(replace(scene, first=_changed(group, base.first), second=None))
    return plain(_edited(request, group, scene, base))


def _placed(scene: Scene, setting: dict[str, str]) -> Scene:
    """`scene` with what `setting` says of place, hour, weather and camera."""
    place, hour, weather, camera = (setting.get(name, getattr(scene, name)) for name in SETTING_TABLES)
    return replace(scene, place=place, hour=hour, weather=weather, camera=camera)


def _describes(request: _Request, groups: list[_Group]) -> bool:
    """Whether a prompt describes a picture of its own, rather than a change of the one that is shown."""
    if not groups or request.edit or request.add or not groups[0].article:
        return False
    named = {**groups[0].implied, **groups[0].says}
    told = sum(name in named for name in ("color", "shape", "motion")) + ("place" in request.setting)
    return "shape" in named and told >= STARTS_OVER


def _edited(request: _Request, group: _Group, scene: Scene, before: Scene) -> Scene:
    """Change the thing that is meant; `before` has two."""
    assert before.second is not None
    said = {**group.implied, **group.says}
    if request.both or not (request.target or {"color", "shape"} & said.keys()):  # "faster" is for all that is there
        return replace(scene, first=_changed(group, before.first), second=_changed(group, before.second))
    told = request.target or said
    distinct = [name for name in ("shape", "color") if getattr(before.first, name) != getattr(before.second, name)]
    owners = [thing for name in distinct for thing in scene.things if told.get(name) == getattr(thing, name)]
    if owners and owners[0] is scene.second:
        return replace(scene, second=_changed(group, before.second))
    return replace(scene, first=_changed(group, before.first))


def _removed(request: _Request, groups: list[_Group], before: Scene) -> Scene:
    """Without what is named: a weather, the thing of that shape or color, or the second thing."""
    setting = {
        name: "still" if name == "camera" else "clear" for name in request.setting if name in ("weather", "camera")
    }
    scene = _placed(before, setting)
    if setting or scene.second is None:
        return scene
    said = {**groups[0].implied, **groups[0].says} if groups else {}
    first_meant = any(getattr(scene.first, name) == value for name, value in said.items())
    second_meant = any(getattr(scene.second, name) == value for name, value in said.items())
    return replace(scene, first=scene.second if first_meant and not second_meant else scene.first, second=None)


def _more(request: _Request, scene: Scene) -> Scene:
    return replace(scene, second=scene.second or _beside(scene.first)) if request.add else scene


def _beside(thing: Thing) -> Thing:
    """A second thing of which nothing is said: unlike the first in color and shape, and going the other way."""
    color = COLOR_NAMES[(COLOR_NAMES.index(thing.color) + 4) % len(COLOR_NAMES)]
    shape = SHAPES[(SHAPES.index(thing.shape) + 3) % len(SHAPES)]
    return Thing(color, shape, _OPPOSITE.get(thing.motion, thing.motion))


def _changed(group: _Group, thing: Thing) -> Thing:
    made = replace(thing, **{**group.implied, **group.says})
    for change in group.changes:
        step = 1 if change == "faster" else -1
        rank = SPEEDS.index(made.speed) + step
        made = replace(made, speed=SPEEDS[max(0, min(rank, len(SPEEDS) - 1))])
    return made


def scene_of(text: str) -> Scene:
    """The scene that a sentence of `canonical`, or any other text, stands for."""
    return apply(parse(text), DEFAULT)


def read(prompt: str, previous: str | None) -> Reading:
    """Turn any prompt into the sentence for what it means, when `previous` (a text that `read` returned) is in force.

    The notice says what was understood otherwise than typed, what was not understood, and what stays as it was.
    """
    before = scene_of(previous) if previous else DEFAULT
    request = parse(prompt)
    scene = apply(request, before)
    text = canonical(scene)
    remarks = _remarks(request.pieces, scene)
    strange = [f"“{piece.typed[:24]}”" for piece in request.pieces if not piece.known]
    if request.empty:
        named = f" ({', '.join(dict.fromkeys(strange[:4]))})" if strange else ""
        return Reading(
            text, f"I did not find anything I can draw in that{named}. I know {VOCABULARY}. Showing “{text}”."
        )
    if sum(bool(piece.values("shape")) for piece in request.pieces) > 2:
        remarks.append("I draw two things at most.")
    if strange:
        remarks.append(f"I do not know {', '.join(dict.fromkeys(strange[:4]))}; I know {VOCABULARY}.")
    if " ".join(prompt.lower().split()) == text:
        return Reading(text)
    remarks.append(f"Showing “{text}”.")
    return Reading(text, " ".join(remarks))


def _remarks(pieces: list[Word], scene: Scene) -> list[str]:
    """What was understood otherwise than typed, each word once, four at most."""
    remarks: dict[str, str] = {}
    for piece in pieces:
        word = piece.typed[:24]
        if piece.misspelt:
            remarks[word] = f"“{word}”: I read “{piece.entry}”."
        if piece.meaning and not piece.meaning.exact and (nearest := _nearest(piece, scene)):
            remarks[word] = f"“{word}”: I draw {nearest}."
    return list(remarks.values())[:4]


def _nearest(piece: Word, scene: Scene) -> str:
    """What is drawn for a word that has only a nearest meaning; empty where other words of the prompt decided."""
    assert piece.meaning is not None
    says = dict(piece.meaning.says)
    for thing in scene.things:
        if "shape" in says and thing.shape == says["shape"]:
            return f"{'an' if thing.color[0] in 'aeiou' else 'a'} {thing.color} {thing.shape}"
    tables = {"motion": MOTION_WORDS, "place": PLACE_WORDS, "hour": HOUR_WORDS, "weather": WEATHER_WORDS}
    shown = {name: {getattr(scene, name)} for name in SETTING_TABLES}
    shown |= {name: {getattr(thing, name) for thing in scene.things} for name in THING_TABLES}
    phrases = [
        (tables[name][value].strip() or "clear weather") if name in tables else value
        for name, value in says.items()
        if value in shown.get(name, {value})
    ]
    return " ".join(phrases)


assert {f.name for f in fields(Thing)} == set(THING_TABLES)
