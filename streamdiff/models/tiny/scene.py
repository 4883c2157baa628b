"""What can be said about a picture of the world: tables of names, and scenes made of them.

Knows nothing about pixels, prompts or tensors of pictures. A scene is also a row of integers, in the order of `FIELDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.89, 0.18, 0.20),
    "orange": (0.98, 0.55, 0.10),
    "yellow": (0.99, 0.87, 0.20),
    "green": (0.16, 0.72, 0.34),
    "blue": (0.16, 0.38, 0.95),
    "purple": (0.60, 0.26, 0.86),
    "white": (0.97, 0.97, 0.97),
}
COLOR_NAMES = tuple(COLORS)
SHAPES = ("circle", "square", "triangle", "star", "heart")
MOTIONS = ("left", "right", "up", "down", "still", "bouncing", "spinning")
SIZES = ("large", "small")
SPEEDS = ("slow", "normal", "fast")
PLACES = ("meadow", "desert", "sea", "sky", "city")
HOURS = ("day", "dusk", "night", "dawn", "passing")
"""`passing`: day turns into night and back again."""
WEATHERS = ("clear", "rain", "snow", "wind")
CAMERAS = ("still", "left", "right")

THING_TABLES: dict[str, tuple[str, ...]] = {
    "color": COLOR_NAMES,
    "shape": SHAPES,
    "motion": MOTIONS,
    "size": SIZES,
    "speed": SPEEDS,
}
SETTING_TABLES: dict[str, tuple[str, ...]] = {
    "place": PLACES,
    "hour": HOURS,
    "weather": WEATHERS,
    "camera": CAMERAS,
}
FIELDS: tuple[str, ...] = (
    *THING_TABLES,
    "second",
    *(f"second_{name}" for name in THING_TABLES),
    *SETTING_TABLES,
)
"""Columns of a scene's row. `second` is 0 or 1: whether there is a second thing; if not, its columns are 0."""
COLUMN = {name: column for column, name in enumerate(FIELDS)}
FIELD_SIZES: tuple[int, ...] = (
    *map(len, THING_TABLES.values()),
    2,
    *map(len, THING_TABLES.values()),
    *map(len, SETTING_TABLES.values()),
)
"""How many values each column has."""


@dataclass(frozen=True)
class Thing:
    """One shape. Fields are names from the tables above."""

    color: str = "red"
    shape: str = "circle"
    motion: str = "right"
    size: str = "large"
    speed: str = "normal"

    def row(self) -> list[int]:
        return [table.index(getattr(self, name)) for name, table in THING_TABLES.items()]


@dataclass(frozen=True)
class Scene:
    """What a prompt says: one or two things, and where, when, in which weather and from where they are seen."""

    first: Thing = Thing()
    second: Thing | None = None
    place: str = "meadow"
    hour: str = "day"
    weather: str = "clear"
    camera: str = "still"

    def row(self) -> list[int]:
        """The scene as integers, in the order of `FIELDS`."""
        second = [1, *self.second.row()] if self.second else [0] * (1 + len(THING_TABLES))
        return [*self.first.row(), *second, *(t.index(getattr(self, n)) for n, t in SETTING_TABLES.items())]

    @property
    def things(self) -> tuple[Thing, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


def from_row(row: Sequence[int]) -> Scene:
    """The scene that `row` stands for; the inverse of `Scene.row`."""

    def thing(values: Sequence[int]) -> Thing:
        return Thing(*(table[value] for table, value in zip(THING_TABLES.values(), values, strict=True)))

    count = len(fields(Thing))
    second = thing(row[count + 1 : 2 * count + 1]) if row[count] else None
    rest = row[2 * count + 1 :]
    return Scene(
        thing(row[:count]), second, *(table[value] for table, value in zip(SETTING_TABLES.values(), rest, strict=True))
    )


def plain(scene: Scene) -> Scene:
    """`scene` without what cannot be said: what stands still has no speed."""

    def settled(thing: Thing) -> Thing:
        return replace(thing, speed="normal") if thing.motion == "still" else thing

    return replace(scene, first=settled(scene.first), second=scene.second and settled(scene.second))
