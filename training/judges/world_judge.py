"""Says from pixels alone what a chunk of the embedded model's world shows, or two in a row, and whether that is what a
scene says.

Never sees the truth, and knows nothing about prompts, latents or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models.tiny.scene import MOTIONS, SETTING_TABLES, THING_TABLES, Scene
from training.judges.scenery_judge import NONE, Setting, see_setting
from training.judges.thing_judge import Seen, see_things
from training.scene_rows import thing_row
from training.world import weather
from training.world.render import render
from training.world.tracks import SIZE

ATTRIBUTES = (*THING_TABLES, "count", *SETTING_TABLES)
"""What a verdict is right or wrong about; those of things count as right when they are for all things."""


@dataclass(frozen=True)
class Verdict:
    """What one chunk shows: its setting (rows, or `NONE`) and at most two things."""

    setting: Setting
    things: tuple[Seen, ...]

    def right(self, scene: Scene) -> dict[str, bool]:
        """Which of `ATTRIBUTES` are what `scene` says."""
        agreed = {
            name: getattr(self.setting, name) == t.index(getattr(scene, name)) for name, t in SETTING_TABLES.items()
        }
        agreed["count"] = len(self.things) == len(scene.things)
        wanted = [thing_row(thing) for thing in scene.things]
        seen = [thing.row() for thing in self.things[: len(wanted)]]
        seen += [[NONE] * len(THING_TABLES)] * (len(wanted) - len(seen))
        orders = [seen, seen[::-1]]
        best = max((_agreements(wanted, order) for order in orders), key=lambda each: sum(map(sum, each)))
        for column, name in enumerate(THING_TABLES):
            agreed[name] = all(each[column] for each in best)
        return {name: agreed[name] for name in ATTRIBUTES}


def _agreements(wanted: list[list[int]], seen: list[list[int]]) -> list[list[bool]]:
    motion, speed = (list(THING_TABLES).index(name) for name in ("motion", "speed"))
    agreed = []
    for want, saw in zip(wanted, seen, strict=True):
        each = [a == b for a, b in zip(want, saw, strict=True)]
        each[speed] |= want[motion] == saw[motion] == MOTIONS.index("still")  # what does not move has no speed
        agreed.append(each)
    return agreed


@torch.no_grad()
def judge(frames: Tensor) -> Verdict:
    """What one chunk shows, or two that follow each other: float `[T, 3, SIZE, SIZE]` in [0, 1], T >= 8.

    Raises:
        ValueError: another layout or size.
    """
    if frames.ndim != 4 or frames.shape[1:] != (3, SIZE, SIZE) or len(frames) < 8:
        raise ValueError(
            f"cannot judge pictures of shape {tuple(frames.shape)}: give float [T, 3, {SIZE}, {SIZE}] in [0, 1] "
            "with at least 8 frames"
        )
    frames = frames.float().clamp(0, 1)
    setting = see_setting(frames)
    if setting.place == NONE:
        return Verdict(setting, ())
    grounds = render(setting.track, things=False, falling=False).frames
    lifted, counts = _lift(frames, setting)
    return Verdict(setting, tuple(see_things(lifted, grounds, counts, setting.track.light)))


def _lift(frames: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """The frames without the rain, snow or wind in front, and how much each pixel then counts `[T, 1, h, w]`."""
    track, lifted = setting.track, frames.clone()
    counts = torch.ones_like(frames[:, :1])
    for index, fall in enumerate(track.fall.tolist()):
        cover = weather.cover(max(0, setting.weather), fall)
        if cover is None:
            continue
        rgb = weather.color(setting.weather, track.light[index]).view(3, 1, 1)
        lifted[index] = ((frames[index] - cover * rgb) / (1 - cover).clamp(min=0.3)).clamp(0, 1)
        counts[index] = torch.where(cover > 0.5, 0.0, 1 - cover)
    return lifted, counts


def describe(verdict: Verdict) -> str:
    """What was seen, in words."""

    def name(table: tuple[str, ...], row: int) -> str:
        return table[row] if row >= 0 else "-"

    things = [" ".join(name(t, r) for t, r in zip(THING_TABLES.values(), s.row(), strict=True)) for s in verdict.things]
    setting = [name(table, getattr(verdict.setting, key)) for key, table in SETTING_TABLES.items()]
    return " + ".join(things or ["nothing"]) + " | " + " ".join(setting)


def shares(rights: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """Of at least one chunk's `Verdict.right` each: share of those right per attribute, and of those right in `all`."""
    each = {name: sum(right[name] for right in rights) / len(rights) for name in ATTRIBUTES}
    return {**each, "all": sum(all(right.values()) for right in rights) / len(rights)}


def mistake(verdict: Verdict, right: Mapping[str, bool], asked: str) -> str:
    """What of `asked`, in words, is not `right`, and what was seen."""
    missed = ", ".join(name for name, good in right.items() if not good)
    return f"{missed}: asked {asked}, seen {describe(verdict)}"
