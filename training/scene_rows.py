"""Scenes as rows of integers, as the renderer and the training take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from streamdiff.models.tiny.scene import SETTING_TABLES, THING_TABLES, Scene, Thing

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


def row_of(scene: Scene) -> list[int]:
    """The scene as integers, in the order of `FIELDS`."""
    second = [1, *thing_row(scene.second)] if scene.second else [0] * (1 + len(THING_TABLES))
    return [*thing_row(scene.first), *second, *(t.index(getattr(scene, n)) for n, t in SETTING_TABLES.items())]


def thing_row(thing: Thing) -> list[int]:
    """The thing as integers, in the order of `THING_TABLES`."""
    return [table.index(getattr(thing, name)) for name, table in THING_TABLES.items()]


def from_row(row: Sequence[int]) -> Scene:
    """The scene that `row` stands for; the inverse of `row_of`."""

    def thing(values: Sequence[int]) -> Thing:
        return Thing(*(table[value] for table, value in zip(THING_TABLES.values(), values, strict=True)))

    count = len(fields(Thing))
    second = thing(row[count + 1 : 2 * count + 1]) if row[count] else None
    rest = row[2 * count + 1 :]
    return Scene(
        thing(row[:count]), second, *(table[value] for table, value in zip(SETTING_TABLES.values(), rest, strict=True))
    )
