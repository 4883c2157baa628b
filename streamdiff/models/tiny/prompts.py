"""The language of the embedded model: what a prompt changes in the picture, and the sentence that the model is given.

A prompt's words are looked up in `words.txt`, plurals and typing mistakes included (`read_words`), sorted into what is
said of things and of their setting (`parse`), and change the scene (`apply`). Every scene is one sentence of a fixed
form (`canonical`), the only one that the model is trained on. Pure text; knows nothing about tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from streamdiff.models.spec import ParsedPrompt
from streamdiff.models.tiny import scene as scenes
from streamdiff.models.tiny.scene import Scene, Thing, plain

TABLE = Path(__file__).parent / "words.txt"
EXAMPLES: tuple[str, ...] = tuple(scenes.WORLD["examples"])
SUGGESTIONS: tuple[tuple[str, ...], ...] = tuple(map(tuple, scenes.WORLD["suggestions"]))
VOCABULARY: str = scenes.WORLD["vocabulary"]
DEFAULT = Scene()
MOST_REMARKS = 4
_OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
_JOINERS = {"and", "with", "while", ",", "and another", "plus"}
_REPLACING = {"replace", "exchange", "swap"}
_BACKGROUNDS = {"background", "backdrop"}
_VERBS = "make|add|remove|delete|turn|change|replace|let|stop|start|set|put|give|swap"
_CLAUSES = re.compile(rf"(?:[,;.]|\b(?:and|then)\b)\s*(?:(?:and|then|also|now)\s+)*(?=(?:{_VERBS})\b)", re.IGNORECASE)
"""Where a prompt asks for one more thing: "make it blue and add a star"."""
_ENDINGS = (("ies", "y"), ("ves", "f"), ("es", ""), ("s", ""))
_MOST_WORDS = 200
_ALIKE = (0.75, 0.8)
"""Of `difflib`, for words of up to five letters and for longer ones: one wrong letter in a word of four."""


# ---- sentences -------------------------------------------------------------------------------------------------------


def canonical(scene: Scene) -> str:
    """The sentence for `scene`. What a prompt means unless it says otherwise (large, by day, ...) is left out."""
    things = " and ".join(map(_thing_words, scene.things))
    return f"{things} {''.join(scenes.PHRASES[name][getattr(scene, name)] for name in scenes.SETTING_TABLES)}"


def _thing_words(thing: Thing) -> str:
    size, motion = scenes.PHRASES["size"][thing.size], scenes.PHRASES["motion"][thing.motion]
    speed = "" if thing.motion == "still" else scenes.PHRASES["speed"][thing.speed]
    return _with_article(f"{size}{thing.color} {thing.shape} {motion}{speed}")


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def known_words() -> list[str]:
    """Every word of the sentences, sorted: the tokenizer's vocabulary."""
    phrases = [phrase for table in scenes.PHRASES.values() for phrase in table.values()]
    return sorted(set(words_of(" ".join([*phrases, "a an and"]))))


def scene_of(text: str) -> Scene:
    """The scene that a sentence of `canonical`, or any other text, stands for."""
    return apply(parse(text), DEFAULT)


def read(prompt: str, previous: str | None) -> ParsedPrompt:
    """Turn any prompt into the sentence for what it means, when `previous` (a text that `read` returned) is in force.

    The notice says what was understood otherwise than typed, what cannot be drawn, and what was asked for in vain.
    """
    scene = scene_of(previous) if previous else DEFAULT
    requests, remarks = list[Request](), list[str]()
    for clause in _CLAUSES.split(prompt):
        request, before = parse(clause), scene
        if requests and "add" in requests[-1].wishes and "it" in request.wishes and scene.second and not request.target:
            request.target = {"color": scene.second.color, "shape": scene.second.shape}  # "it" is what was just added
        scene = apply(request, before)
        remarks += _remarks(request, before, scene) or _in_vain(request, before, scene)
        requests.append(request)
    text = canonical(scene)
    if " ".join(prompt.lower().split()) == text:
        return ParsedPrompt(text)
    if unknown := dict.fromkeys(word.typed[:24] for each in requests for word in each.words if not word.known):
        remarks.append(f"This small model can't draw {', '.join(f'“{word}”' for word in list(unknown)[:4])}.")
    elif not remarks and all(each.empty for each in requests):
        remarks.append("This small model can't draw that.")
    return ParsedPrompt(text, " ".join(list(dict.fromkeys(remarks))[:MOST_REMARKS]))


def _in_vain(request: Request, before: Scene, scene: Scene) -> list[str]:
    """Why a request changed nothing, where it asked for a change."""
    if scene != before or request.empty or not (request.wishes or request.groups[0].changes or request.ends):
        return []
    group = request.groups[0]
    if "remove" in request.wishes:
        if _absent(group.looks, before):
            return [f"There is no {' '.join(group.looks.values())}."]
        return ["There is always at least one thing."] if before.second is None else []
    if speeds := {"faster", "slower"} & set(group.changes):
        return [f"It is as {speeds.pop().removesuffix('er')} as it gets."]
    return [f"It is as {group.named['size']} as it gets."] if "size" in group.named else ["It looks like that already."]


def _absent(looks: Mapping[str, str], scene: Scene) -> bool:
    """Whether something is named that none of the things is."""
    return not any(all(getattr(thing, name) == value for name, value in looks.items()) for thing in scene.things)


def _remarks(request: Request, before: Scene, scene: Scene) -> list[str]:
    """What was understood otherwise than typed, each word once, `MOST_REMARKS` at most."""
    remarks: dict[str, str] = {}
    for group in request.spoken:
        color = group.named.get("color")
        for word in group.words:
            typed = word.typed[:24]
            if word.misspelt:
                remarks[typed] = f"“{typed}”: I read “{word.entry}”."
            if "cannot" in word.says:
                remarks[typed] = f"“{typed}”: {scenes.WORLD['cannot'][word.says['cannot']]}."
            if not word.exact and (nearest := _nearest(word, group, request, scene)):
                remarks[typed] = f"“{typed}”: I draw {nearest}."
            dropped = sum("shape" in each.says for each in request.words) > 2  # the color may be that of a third thing
            if word.exact and word.says.get("color", color) != color and not request.target and not dropped:
                remarks[typed] = f"“{typed}”: a thing has one color."
    for color in request.uncolored:
        remarks[color] = f"“{color}”: things have colors to choose from, the background has not."
    return [*remarks.values(), *(["I draw two things at most."] if _too_many(request, before) else [])]


def _too_many(request: Request, before: Scene) -> bool:
    counted = any(word.says.get("count") == "two" and not word.exact for word in request.words)
    shaped = [group for group in request.groups if "shape" in group.said]
    return (
        counted
        or (len(shaped) == 2 and any(group.two for group in shaped))  # "two stars and a heart"
        or sum("shape" in word.says for word in request.words) > 2
        or bool("add" in request.wishes and not request.setting and before.second)
    )


def _nearest(word: Word, group: Group, request: Request, scene: Scene) -> str:
    """What is drawn for a word that has only a nearest meaning; empty where other words of the prompt decided."""
    decided = {**group.said, **request.setting}
    won = {name: value for name, value in word.says.items() if decided.get(name) is word}
    if "shape" in won:
        things: Sequence[Thing] = scene.things if group is request.groups[0] else scene.things[::-1]
        alike = [thing for thing in things if thing.shape == won["shape"]]
        of_color = [thing for thing in alike if thing.color == group.named.get("color", thing.color)]
        for thing in [*of_color, *alike][:1]:
            return _with_article(f"{thing.color} {thing.shape}")
    return " and ".join(scenes.WORLD["drawn"].get(name, {}).get(value, value) for name, value in won.items())


# ---- words -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A piece of a prompt: its words as typed, and the entry of the table that was found (after plural and spelling)
    with what it `says`, values by field; `exact` is False where that is only the nearest that can be drawn. Nothing is
    said by a filler and by what is not known (`known` tells them apart). `many`: a plural."""

    typed: str
    entry: str
    says: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False
    known: bool = True
    many: bool = False

    @property
    def misspelt(self) -> bool:
        return self.known and not self.many and self.typed != self.entry


class WordTable(NamedTuple):
    """`words.txt`: what words and phrases (with single spaces) say, and whether exactly; `fillers`, words that may
    stand in a prompt and say nothing of their own; `apart`, English words that look like
    some of these and are no typing mistakes (`english.txt`)."""

    meanings: dict[str, tuple[dict[str, str], bool]]
    fillers: set[str]
    apart: set[str]


@cache
def word_table() -> WordTable:
    table = WordTable({}, set(), set())
    table.apart.update((TABLE.parent / "english.txt").read_text(encoding="utf-8").split("\n\n")[1].split())
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        meaning, _, words = line[1:].partition(":")
        if line.startswith(("=", "~")):
            says = dict(part.split() for part in meaning.split(","))
            for word in words.split():
                table.meanings[re.sub("[_-]", " ", word)] = says, line[0] == "="
        elif line.startswith("."):
            table.fillers.update(words.split())
    return table


def words_of(text: str) -> list[str]:
    """Lower-case words of a text and commas; other punctuation, digits and symbols separate."""
    return re.findall(r"[a-z]+|,", re.sub(r"['\u2019]s\b", "", text.lower()))


def read_words(prompt: str) -> list[Word]:
    """The prompt as pieces, longest phrases first."""
    meanings, typed = word_table().meanings, words_of(prompt)[:_MOST_WORDS]
    longest = max(entry.count(" ") for entry in meanings) + 1
    found: list[Word] = []
    while typed:
        phrases = (" ".join(typed[:length]) for length in range(min(longest, len(typed)), 1, -1))
        phrase = next((phrase for phrase in phrases if phrase in meanings), typed[0])
        found.append(_word(phrase))
        del typed[: phrase.count(" ") + 1]
    return found


def _word(typed: str) -> Word:
    """What a single word, or a phrase of the table, says."""
    meanings, fillers, _ = word_table()
    if typed in meanings:
        return Word(typed, typed, *meanings[typed])
    if typed in fillers or len(typed) < 3:
        return Word(typed, typed)
    for ending, instead in _ENDINGS:
        entry = typed.removesuffix(ending) + instead
        if typed.endswith(ending) and len(typed) >= len(ending) + 2 and entry in meanings:
            return Word(typed, entry, *meanings[entry], many=True)
    if (spelt := _spelt(typed)) is not None:
        return Word(typed, spelt, *meanings[spelt])
    return Word(typed, typed, known=False)


@lru_cache(maxsize=4096)
def _spelt(word: str) -> str | None:
    """The known single word that was probably meant. Short words are taken for no word of the table that has only a
    nearest meaning: too many look like it."""
    meanings, _, apart = word_table()
    if not 4 <= len(word) <= 20 or word in apart:
        return None
    candidates = [
        entry
        for entry, (_, exact) in meanings.items()
        if (exact or len(word) >= 6) and " " not in entry and len(entry) > 2
        if word[0] == entry[0] or word[1] == entry[1]
    ]
    return next(iter(get_close_matches(word, candidates, 1, _ALIKE[len(word) > 5])), None)


# ---- what a prompt asks for ------------------------------------------------------------------------------------------


class Group:
    """What a prompt says of one thing, in these `words`: `said` is the word that decides each field of `Thing`, the
    first exact one, else the first near one. `article`: it has a or an; `many`: its shape is in the plural."""

    def __init__(self, words: Sequence[Word]) -> None:
        self.words = words
        self.said: dict[str, Word] = {}
        for word in words:
            for name in scenes.THING_TABLES.keys() & word.says.keys():
                if name not in self.said or (word.exact and not self.said[name].exact):
                    self.said[name] = word
        self.changes, self.two = _values(words, "change"), "two" in _values(words, "count")
        self.article = any(word.entry in ("a", "an") for word in words)
        self.many = any(word.many and "shape" in word.says for word in words)

    @property
    def named(self) -> dict[str, str]:
        """Fields of `Thing` and their values."""
        return {name: word.says[name] for name, word in self.said.items()}

    @property
    def looks(self) -> dict[str, str]:
        """Those by which it can be told from another."""
        return {name: value for name, value in self.named.items() if name in ("color", "shape")}

    @property
    def empty(self) -> bool:
        return not (self.said or self.changes or self.two)


def _values(words: Sequence[Word], name: str) -> list[str]:
    """What the words say of a field."""
    return [word.says[name] for word in words if name in word.says]


class Request:
    """A parsed prompt, of `words`: `groups` of what is to be, of those `spoken` of, and `setting`, the word that
    decides each field of it. `uncolored` are colors that were said of the setting, which has none that can be chosen;
    `target` what is said of the thing that is to become another, as in "turn the circle into a heart". `ends` are
    weathers that are to end; `wishes` any of add, remove, one, both and edit."""

    def __init__(self, words: Sequence[Word], spoken: list[Group], uncolored: list[str]) -> None:
        self.words, self.spoken, self.uncolored = words, spoken, uncolored
        self.groups, self.target, self.setting = spoken, dict[str, str](), dict[str, Word]()
        for word in words:
            for name in scenes.SETTING_TABLES.keys() & word.says.keys():
                if word.exact or name not in self.setting or not self.setting[name].exact:  # the last word counts
                    self.setting[name] = word
        self.ends = set(_values(words, "end"))
        edits = _values(words, "refer") + _values(words, "edit")
        self.wishes = {*edits, *_values(words, "count"), *(("edit",) if edits else ())}
        if words and words[0].entry in ("and", "plus", "with"):
            self.wishes.add("add")
        if words and words[0].entry == "no" and spoken[0].looks:  # "no circle"
            self.wishes.add("remove")

    @property
    def empty(self) -> bool:
        described = not all(group.empty for group in self.groups) or self.setting or self.ends
        return not (described or self.wishes & {"add", "remove", "one"})


def parse(prompt: str) -> Request:
    """Sort the prompt's words into what is said of things and of their setting."""
    typed = read_words(prompt)
    uncolored = _colors_of_setting(typed)
    words = [word for index, word in enumerate(typed) if index not in uncolored]
    cut = _cut(words)
    spoken = [Group(half) for half in (words[:cut], words[cut:]) if half] or [Group([])]
    request = Request(words, spoken, [typed[index].typed for index in uncolored])
    _find_target(request)
    return request


def _cut(words: list[Word]) -> int:
    """Where the second thing begins to be spoken of, before the second shape's words; at the end where it is not."""
    shapes = [index for index, word in enumerate(words) if "shape" in word.says]
    if len(shapes) > 1:
        between = range(shapes[0] + 1, shapes[1])
        cuts = [index for index in between if words[index].entry in {*_JOINERS, "instead of"}]
        begins = [i for i in between if words[i].entry in ("a", "an", "the") or "color" in words[i].says]
        return cuts[-1] if cuts else (begins or [shapes[1]])[0]
    colors = _exact_colors(words)
    if len(shapes) == 1 and words[shapes[0]].many and len(colors) == 2 and colors[1] < shapes[0]:
        return colors[1]  # "red and blue circles"
    return len(words)


def _exact_colors(words: Sequence[Word]) -> list[int]:
    return [index for index, word in enumerate(words) if word.exact and "color" in word.says]


def _colors_of_setting(words: list[Word]) -> list[int]:
    """Which words are colors of a place, an hour or a weather: "a green meadow", "make the sky purple"."""

    def setting(word: Word) -> bool:
        # "blue in the rain" is a blue thing: only nouns have colors, not "in the rain"
        only_setting = word.says and word.says.keys() <= scenes.SETTING_TABLES.keys()
        place = bool(only_setting) and word.entry.split()[0] not in word_table().fillers
        return place or word.entry in _BACKGROUNDS

    about_things = any({"shape", "refer"} & word.says.keys() for word in words)
    found = []
    for index in _exact_colors(words):
        before, after = words[max(0, index - 1) : index], words[index + 1 : index + 3]
        of_thing = len(after) == 2 and "shape" in after[1].says  # "a green desert flower"
        if (any(map(setting, after[:1])) and not of_thing) or (any(map(setting, before)) and not about_things):
            found.append(index)
    return found


def _find_target(request: Request) -> None:
    """Find out whether one half of the prompt only says which thing is meant. Mutates: request."""
    groups, entries = request.groups, {word.entry for word in request.words}
    if len(groups) == 2:
        joined = groups[1].words[0].entry in _JOINERS
        if "instead of" in entries:
            kept, target = groups
        elif "edit" in request.wishes and (not joined or entries & _REPLACING):
            target, kept = groups
        else:
            return
        request.target, request.groups = target.named, [kept]
        return
    [group], colors = groups, _exact_colors(groups[0].words)
    if "edit" not in request.wishes or len(colors) != 2 or group.article:
        return
    between = group.words[colors[0] + 1 : colors[1]]
    if any("shape" in word.says or word.entry in ("one", "thing") for word in between):  # "make the blue one red"
        request.target = group.looks
        group.said.pop("shape", None)
        group.said["color"] = group.words[colors[1]]


# ---- the scene after it ----------------------------------------------------------------------------------------------


def apply(request: Request, before: Scene) -> Scene:
    """The scene after a request, when `before` was shown. What it leaves open stays, unless it describes a new one."""
    groups, wishes = [group for group in request.groups if not group.empty], request.wishes
    if "remove" in wishes:
        return _removed(request, groups, before)
    setting = {name: word.says[name] for name, word in request.setting.items()}
    scene = _placed(DEFAULT if _describes(request, groups) else before, setting, request.ends)
    if not groups:
        if "add" in wishes and not request.setting:  # "add snow" adds no thing
            return replace(scene, second=scene.second or _beside(scene.first))
        return replace(scene, second=None) if "one" in wishes else scene
    group, first = groups[0], scene.first
    if len(groups) == 2:
        scene = _both(groups, scene)
    elif "add" in wishes:
        scene = replace(scene, second=_changed(group, scene.second or _beside(first)))
    elif group.two or (group.many and (scene.second or "both" not in wishes)):
        first = _changed(group, first)
        scene = replace(scene, first=first, second=_changed(group, scene.second or _beside(first)))
    elif "one" in wishes or scene.second is None or (group.article and "edit" not in wishes and "shape" in group.said):
        meant = ("one" in wishes and _owner(group.named, scene)) or first
        scene = replace(scene, first=_changed(group, meant), second=None)
    else:
        scene = _edited(request, group, scene)
    return plain(scene)


def _describes(request: Request, groups: list[Group]) -> bool:
    """Whether a prompt describes a picture of its own ("a star at night") rather than a change of the one shown."""
    if not groups or request.target or request.wishes & {"edit", "add", "one", "both"}:
        return False
    return "shape" in groups[0].said and (groups[0].article or groups[0].two)


def _placed(scene: Scene, setting: dict[str, str], ends: set[str]) -> Scene:
    """`scene` with what `setting` says of place, hour, weather and camera, and without a weather that `ends`."""
    scene = replace(scene, **setting)  # type: ignore[arg-type]
    return replace(scene, weather="clear") if scene.weather in ends else scene


def _both(groups: list[Group], scene: Scene) -> Scene:
    """Both things changed, or given, whichever of them is spoken of first."""
    one, other = groups
    if "shape" not in one.said:  # "red and blue circles"
        one.said = {**other.said, **one.said}
    both = next((index for index, word in enumerate(other.words) if word.entry == "both"), len(other.words))
    for word in other.words[both:]:  # "a circle and a star, both small"
        one.said.update(dict.fromkeys(word.says.keys() & {"size", "motion", "speed"}, word))
    owners = [_owner(group.named, scene) for group in (one, other)]
    if scene.second and owners in ([scene.second, scene.first], [scene.second, None], [None, scene.first]):
        one, other = other, one
    thing = _changed(one, scene.first)
    return replace(scene, first=thing, second=_changed(other, scene.second or _beside(thing)))


def _owner(said: dict[str, str], scene: Scene) -> Thing | None:
    """The one of the scene's two things that `said` describes by shape or color; None if that is not clear."""
    if scene.second is None:
        return None
    for name in ("shape", "color"):
        first, second = (getattr(thing, name) for thing in scene.things)
        if first != second and said.get(name) in (first, second):
            return scene.first if said[name] == first else scene.second
    return None


def _edited(request: Request, group: Group, scene: Scene) -> Scene:
    """Change the thing that is meant, or both; `scene` has two."""
    assert scene.second is not None
    meant = request.target or group.looks
    if "both" in request.wishes or not meant:  # "faster" is for all that is there
        return replace(scene, first=_changed(group, scene.first), second=_changed(group, scene.second))
    if _owner(meant, scene) is scene.second:
        return replace(scene, second=_changed(group, scene.second))
    return replace(scene, first=_changed(group, scene.first))


def _removed(request: Request, groups: list[Group], before: Scene) -> Scene:
    """Without what is named: a weather, the camera's movement, the thing of that shape or color, or the second one."""
    setting = request.setting
    weather = {setting["weather"].says["weather"]} if "weather" in setting else set()
    scene = _placed(before, {"camera": "still"} if "camera" in setting else {}, request.ends | weather)
    if request.ends or {"weather", "camera"} & setting.keys() or scene.second is None:
        return scene
    if groups and _absent(groups[0].looks, scene):
        return scene
    first_meant = bool(groups) and _owner(groups[0].named, scene) is scene.first
    return replace(scene, first=scene.second if first_meant else scene.first, second=None)


def _beside(thing: Thing) -> Thing:
    """A second thing of which nothing is said: unlike the first in color and shape, and going the other way."""
    color = scenes.COLOR_NAMES[(scenes.COLOR_NAMES.index(thing.color) + 4) % len(scenes.COLOR_NAMES)]
    shape = scenes.SHAPES[(scenes.SHAPES.index(thing.shape) + 3) % len(scenes.SHAPES)]
    return Thing(color, shape, _OPPOSITE.get(thing.motion, thing.motion))


def _changed(group: Group, thing: Thing) -> Thing:
    """`thing` with what the group says of it."""
    named = group.named
    if "reverse" in group.changes and "motion" in named and not group.said["motion"].exact:
        named.pop("motion")  # "move the other way"
    thing = replace(thing, **named)
    for change in group.changes:
        if change == "reverse":
            thing = replace(thing, motion=_OPPOSITE.get(thing.motion, thing.motion))
        else:
            rank = scenes.SPEEDS.index(thing.speed) + (1 if change == "faster" else -1)
            thing = replace(thing, speed=scenes.SPEEDS[max(0, min(rank, len(scenes.SPEEDS) - 1))])
    return thing
