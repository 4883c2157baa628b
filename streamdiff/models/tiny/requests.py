"""What a prompt asks for: its words, sorted into what is said of things and of their setting, and the scene after it.

Pure text; knows nothing about tensors, nor about how people are answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from streamdiff.models.tiny.scene import (
    COLOR_NAMES,
    SETTING_TABLES,
    SHAPES,
    SPEEDS,
    THING_TABLES,
    Scene,
    Thing,
    plain,
)
from streamdiff.models.tiny.vocabulary import FILLERS, Word, read_words

DEFAULT = Scene()
STARTS_OVER = 3
"""A prompt that says so much of color, shape, motion and place, with an article, describes a new picture."""
_OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
_JOINERS = ("and", "with", "while", ",", "and another", "plus")
_REPLACING = {"replace", "exchange", "swap"}


@dataclass
class Group:
    """What a prompt says of one thing: fields of `Thing` (`says` by exact words, `implied` by near ones), and how it
    speaks of it. `target`: what is said of the thing that is to become another, "turn the circle into a heart"."""

    says: dict[str, str] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    article: bool = False
    two: bool = False
    many: bool = False
    """Spoken of in the plural."""

    @property
    def says_anything(self) -> bool:
        return bool(self.says or self.implied or self.changes or self.two)

    @property
    def named(self) -> dict[str, str]:
        """What is said, exact words before near ones."""
        return {**self.implied, **self.says}


@dataclass
class Request:
    """A parsed prompt. `pieces` are its words, each with the group it was found in."""

    groups: list[Group] = field(default_factory=list)
    setting: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[Word, Group]] = field(default_factory=list)
    certain: set[str] = field(default_factory=set)
    """Of the setting what was said exactly."""
    ends: set[str] = field(default_factory=set)
    """Weathers that are to end."""
    uncolored: list[str] = field(default_factory=list)
    """Colors that were said of the setting, which has none that can be chosen."""
    add: bool = False
    remove: bool = False
    one: bool = False
    both: bool = False
    edit: bool = False
    target: dict[str, str] = field(default_factory=dict)
    """What is said of the thing that is to become another: "turn the circle into a heart"."""

    @property
    def empty(self) -> bool:
        described = any(group.says_anything for group in self.groups) or self.setting or self.ends
        return not (described or self.add or self.remove or self.one)


def parse(prompt: str) -> Request:
    """Sort the prompt's words into what is said of things and of their setting."""
    pieces = read_words(prompt)
    request, uncolored = Request(), _colors_of_setting(pieces)
    spans = _spans(pieces)
    for start, end in spans:
        group = Group()
        for index in range(start, end):
            request.pieces.append((pieces[index], group))
            if index in uncolored:
                request.uncolored.append(pieces[index].typed)
            else:
                _take(pieces[index], group, request)
        request.groups.append(group)
    _find_target(request, pieces, spans)
    return request


def _spans(pieces: list[Word]) -> list[tuple[int, int]]:
    """Where the first and the second thing are spoken of: the prompt is cut once, before the second shape's words."""
    shapes = [index for index, piece in enumerate(pieces) if piece.values("shape")]
    if len(shapes) > 1:
        between = range(shapes[0] + 1, shapes[1])
        cuts = [index for index in between if pieces[index].entry in (*_JOINERS, "instead of")]
        begins = [i for i in between if pieces[i].entry in ("a", "an", "the") or pieces[i].values("color")]
        cut = cuts[-1] if cuts else (begins or [shapes[1]])[0]
        return [(0, cut), (cut, len(pieces))]
    colors = _exact_colors(pieces)
    if len(shapes) == 1 and pieces[shapes[0]].many and len(colors) == 2 and colors[1] < shapes[0]:
        return [(0, colors[1]), (colors[1], len(pieces))]  # "red and blue circles"
    return [(0, len(pieces))]


def _exact_colors(pieces: list[Word]) -> list[int]:
    return [i for i, piece in enumerate(pieces) if piece.meaning and piece.meaning.exact and piece.values("color")]


def _colors_of_setting(pieces: list[Word]) -> set[int]:
    """Which pieces are colors of a place, an hour or a weather: "a green meadow", "make the sky purple"."""

    def setting(index: int) -> bool:
        meaning = pieces[index].meaning if 0 <= index < len(pieces) else None
        names = {name for name, _ in meaning.says} if meaning else set()
        # "blue in the rain" is a blue thing: only nouns have colors, not "in the rain"
        return bool(names) and names <= SETTING_TABLES.keys() and pieces[index].entry.split()[0] not in FILLERS

    about_things = any(piece.values("shape") or piece.values("refer") for piece in pieces)
    found = set()
    for index in _exact_colors(pieces):
        follows = index + 2 < len(pieces) and bool(pieces[index + 2].values("shape"))  # "a green desert flower"
        if (setting(index + 1) and not follows) or (setting(index - 1) and not about_things):
            found.add(index)
    return found


def _take(piece: Word, group: Group, request: Request) -> None:
    """Mutates: group, request."""
    if piece.entry in ("a", "an"):
        group.article = True
    if piece.meaning is None:
        return
    for name, value in piece.meaning.says:
        if name in THING_TABLES:
            (group.says if piece.meaning.exact else group.implied).setdefault(name, value)
            group.many |= name == "shape" and piece.many
        elif name in SETTING_TABLES and (piece.meaning.exact or name not in request.certain):
            request.setting[name] = value  # the last word counts
            request.certain |= {name} if piece.meaning.exact else set()
        elif name == "end":
            request.ends.add(value)
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


def _find_target(request: Request, pieces: list[Word], spans: list[tuple[int, int]]) -> None:
    """Find out whether one half of the prompt only says which thing is meant. Mutates: request."""
    groups, entries = request.groups, {piece.entry for piece in pieces}
    if len(groups) == 2:
        joined = pieces[spans[1][0]].entry in _JOINERS
        if "instead of" in entries:
            kept, target = groups
        elif request.edit and (not joined or entries & _REPLACING):
            target, kept = groups
        else:
            return
        request.target, request.edit, groups[:] = target.says, True, [kept]
        return
    colors = _exact_colors(pieces)
    if not request.edit or len(colors) != 2 or groups[0].article:
        return
    between = pieces[colors[0] + 1 : colors[1]]
    if any(piece.values("shape") or piece.entry in ("one", "thing") for piece in between):  # "make the blue one red"
        says = groups[0].says
        request.target = {name: says[name] for name in ("shape", "color") if name in says}
        groups[0].says = {name: value for name, value in says.items() if name != "shape"}
        groups[0].says["color"] = pieces[colors[1]].values("color")[0]


def apply(request: Request, before: Scene) -> Scene:
    """The scene after a request, when `before` was shown. What it leaves open stays, unless it describes a new one."""
    groups = [group for group in request.groups if group.says_anything]
    if request.remove:
        return _removed(request, groups, before)
    base = DEFAULT if _describes(request, groups) else before
    scene = _placed(base, request.setting, request.ends)
    if not groups:
        if request.add:
            return replace(scene, second=scene.second or _beside(scene.first))
        return replace(scene, second=None) if request.one else scene
    if len(groups) == 2:
        return plain(_both(groups, scene))
    group = groups[0]
    first, second = scene.first, scene.second or _beside(scene.first)
    if request.add:
        return plain(replace(scene, second=_changed(group, second)))
    if group.two or (group.many and (scene.second or not request.both)):
        first = _changed(group, first)
        return plain(replace(scene, first=first, second=_changed(group, scene.second or _beside(first))))
    if request.one or scene.second is None or (group.article and not request.edit and "shape" in group.named):
        meant = (request.one and _owner(group.named, scene)) or first
        return plain(replace(scene, first=_changed(group, meant), second=None))
    return plain(_edited(request, group, scene))


def _describes(request: Request, groups: list[Group]) -> bool:
    """Whether a prompt describes a picture of its own, rather than a change of the one that is shown."""
    if not groups or request.edit or request.add or not groups[0].article:
        return False
    named = groups[0].named
    count = sum(name in named for name in ("color", "shape", "motion")) + ("place" in request.setting)
    return "shape" in named and count >= STARTS_OVER


def _placed(scene: Scene, setting: dict[str, str], ends: set[str]) -> Scene:
    """`scene` with what `setting` says of place, hour, weather and camera, and without a weather that `ends`."""
    place, hour, weather, camera = (setting.get(name, getattr(scene, name)) for name in SETTING_TABLES)
    return replace(scene, place=place, hour=hour, weather="clear" if weather in ends else weather, camera=camera)


def _both(groups: list[Group], scene: Scene) -> Scene:
    """Both things changed, or given; whoever speaks of the second one first is understood too."""
    shared = groups[1].says if "shape" not in groups[0].named else {}  # "red and blue circles"
    groups = [replace(groups[0], says={**shared, **groups[0].says}), groups[1]]
    owners = [_owner(group.named, scene) for group in groups]
    if scene.second and (
        (owners[0] is scene.second and owners[1] is not scene.second)
        or (owners[1] is scene.first and owners[0] is not scene.first)
    ):
        groups.reverse()
    first = _changed(groups[0], scene.first)
    return replace(scene, first=first, second=_changed(groups[1], scene.second or _beside(first)))


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
    """Change the thing that is meant; `scene` has two."""
    assert scene.second is not None
    said = group.named
    if request.both or not (request.target or {"color", "shape"} & said.keys()):  # "faster" is for all that is there
        return replace(scene, first=_changed(group, scene.first), second=_changed(group, scene.second))
    if _owner(request.target or said, scene) is scene.second:
        return replace(scene, second=_changed(group, scene.second))
    return replace(scene, first=_changed(group, scene.first))


def _removed(request: Request, groups: list[Group], before: Scene) -> Scene:
    """Without what is named: a weather, the camera's movement, the thing of that shape or color, or the second one."""
    setting = {}
    if request.setting.get("weather") == before.weather:
        setting["weather"] = "clear"
    if "camera" in request.setting:
        setting["camera"] = "still"
    scene = _placed(before, setting, request.ends)
    if request.ends or {"weather", "camera"} & request.setting.keys() or scene.second is None:
        return scene
    first_meant = bool(groups) and _owner(groups[0].named, scene) is scene.first
    return replace(scene, first=scene.second if first_meant else scene.first, second=None)


def _beside(thing: Thing) -> Thing:
    """A second thing of which nothing is said: unlike the first in color and shape, and going the other way."""
    color = COLOR_NAMES[(COLOR_NAMES.index(thing.color) + 4) % len(COLOR_NAMES)]
    shape = SHAPES[(SHAPES.index(thing.shape) + 3) % len(SHAPES)]
    return Thing(color, shape, _OPPOSITE.get(thing.motion, thing.motion))


def _changed(group: Group, thing: Thing) -> Thing:
    implied = dict(group.implied)
    if "reverse" in group.changes:
        implied.pop("motion", None)  # "move the other way"
    made = replace(thing, **{**implied, **group.says})
    for change in group.changes:
        if change == "reverse":
            made = replace(made, motion=_OPPOSITE.get(made.motion, made.motion))
        else:
            rank = SPEEDS.index(made.speed) + (1 if change == "faster" else -1)
            made = replace(made, speed=SPEEDS[max(0, min(rank, len(SPEEDS) - 1))])
    return made
