"""What can be said about a picture of the world: tables of names, and scenes made of them.

Knows nothing about pixels, prompts or tensors of pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
