"""What can be said about a picture of the world: tables of names, and scenes made of them.

Knows nothing about pixels, prompts or tensors of pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

WORLD: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "world.yaml").read_text(encoding="utf-8"))
PHRASES: dict[str, dict[str, str]] = WORLD["phrases"]
"""Words of a sentence by field and value of a scene. Weights depend on the values' order."""
THING_TABLES = {name: tuple(PHRASES[name]) for name in ("color", "shape", "motion", "size", "speed")}
COLOR_NAMES, SHAPES, MOTIONS, SIZES, SPEEDS = THING_TABLES.values()
SETTING_TABLES = {name: tuple(PHRASES[name]) for name in ("place", "hour", "weather", "camera")}
PLACES, HOURS, WEATHERS, CAMERAS = SETTING_TABLES.values()


@dataclass(frozen=True)
class Thing:
    """One shape. Fields are names from the tables above."""

    color: str = "red"
    shape: str = "circle"
    motion: str = "right"
    size: str = "large"
    speed: str = "normal"


@dataclass(frozen=True)
class Scene:
    """What a prompt says: one or two things, and where, when, in which weather and from where they are seen."""

    first: Thing = Thing()
    second: Thing | None = None
    place: str = "meadow"
    hour: str = "day"
    weather: str = "clear"
    camera: str = "still"

    @property
    def things(self) -> tuple[Thing, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


def plain(scene: Scene) -> Scene:
    """`scene` without what cannot be said: what stands still has no speed."""

    def settled(thing: Thing) -> Thing:
        return replace(thing, speed="normal") if thing.motion == "still" else thing

    return replace(scene, first=settled(scene.first), second=scene.second and settled(scene.second))
