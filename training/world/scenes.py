"""Random scenes, as rows of integers in the order of `scene.FIELDS`."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from streamdiff.models.tiny.scene import MOTIONS, SETTING_TABLES, THING_TABLES, Scene, Thing, plain
from training.scene_rows import COLUMN, FIELD_SIZES

TWO_THINGS = 2 / 3
"""Share of random scenes with two things."""
HARD_MOTIONS, HARD_SHARE = (MOTIONS.index("bouncing"), MOTIONS.index("spinning")), 0.2
"""One of these rows is the motion of such a share of random things, besides those that have it by chance."""


def draw_scenes(count: int, generator: torch.Generator, second: Tensor | None = None) -> Tensor:
    """`count` random scenes, int64 `[count, len(FIELDS)]`, two of three with two things, or those of which `second`
    int64 `[count]` says 1.

    A part of them is by day, in clear weather or with a still camera more often than chance would have it: these are
    what a prompt that does not name them means. What bounces or spins, which takes longest to learn, is there nearly
    twice as often as each of the other motions.
    """
    rows = torch.stack([torch.randint(n, (count,), generator=generator) for n in FIELD_SIZES], 1)
    two = torch.rand(count, generator=generator) < TWO_THINGS
    rows[:, COLUMN["second"]] = two.long() if second is None else second
    for name in ("motion", "second_motion"):
        hard = torch.tensor(HARD_MOTIONS)[torch.randint(len(HARD_MOTIONS), (count,), generator=generator)]
        again = torch.rand(count, generator=generator) < HARD_SHARE
        rows[:, COLUMN[name]] = torch.where(again, hard, rows[:, COLUMN[name]])
    for name in ("hour", "weather", "camera"):
        plain = torch.rand(count, generator=generator) < 0.3
        rows[:, COLUMN[name]] = torch.where(plain, 0, rows[:, COLUMN[name]])
    return tidy(rows)


def redraw(rows: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Scenes like `rows` `[N, fields]` with each column drawn anew with probability `share`."""
    fresh = draw_scenes(len(rows), generator)
    return tidy(torch.where(torch.rand(rows.shape, generator=generator) < share, fresh, rows))


def tidy(rows: Tensor) -> Tensor:
    """`rows` with the columns of second things that are not there set to 0. Mutates: rows."""
    first = COLUMN["second"]
    rows[:, first + 1 : first + 1 + len(THING_TABLES)] *= rows[:, first, None]
    return rows


def random_scene(chance: random.Random) -> Scene:
    """A random scene that can be said."""

    def thing() -> Thing:
        return Thing(*(chance.choice(table) for table in THING_TABLES.values()))

    rest = {name: chance.choice(table) for name, table in SETTING_TABLES.items()}
    return plain(Scene(thing(), thing() if chance.random() < 0.5 else None, **rest))
