"""Truth to judge against: random scenes, their films, shares of right verdicts, contact sheets of what was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks.world_judge import Verdict
from streamdiff.models.tiny import world

ATTRIBUTES = ("color", "shape", "motion", "background")
NAMES: dict[str, tuple[str, ...]] = {
    "color": world.COLOR_NAMES,
    "shape": world.SHAPES,
    "motion": world.MOTION_NAMES,
    "background": world.BACKGROUNDS,
}
GAP = 4
LINE = 16


def draw_scenes(count: int, generator: torch.Generator) -> list[world.Scene]:
    """`count` scenes without repetition while there are any, so that few prompts cover the world well."""
    scenes = world.all_scenes()
    order: list[int] = []
    while len(order) < count:
        order += torch.randperm(len(scenes), generator=generator).tolist()
    return [scenes[row] for row in order[:count]]


def rows_of(scenes: Sequence[world.Scene]) -> Tensor:
    """Int64 `[N, 4]`: the scenes as rows of the world's tables, in the order of `ATTRIBUTES`."""
    return torch.tensor([scene.indices() for scene in scenes])


@dataclass(frozen=True)
class Film:
    """True pictures float32 `[N, T, 3, SIZE, SIZE]` and where the shape is: int64 `[N, T, 2]`, (y, x), not wrapped."""

    frames: Tensor
    position: Tensor

    @property
    def step(self) -> Tensor:
        """Float32 `[N, T - 1, 2]`: true displacement between neighbouring frames."""
        return (self.position[:, 1:] - self.position[:, :-1]).float()


def film(scenes: Tensor, start: Tensor, frames: int) -> Film:
    """Render scenes `[N, 4]` for `frames` frames, shapes centred at `start` int64 `[N, 2]` in the first."""
    speed = world.velocities()[scenes[:, 2]]
    position = start[:, None] + torch.arange(frames)[None, :, None] * speed[:, None]
    color, shape, _, background = scenes.repeat_interleave(frames, 0).unbind(1)
    pictures = world.render(color, shape, background, position[..., 0].flatten(), position[..., 1].flatten())
    return Film(pictures.view(len(scenes), frames, *pictures.shape[1:]), position)


def shares(right: Tensor) -> dict[str, float]:
    """Share of right verdicts per attribute, and of chunks where `all` are right, of bool `[N, 4]`."""
    each = dict(zip(ATTRIBUTES, right.float().mean(0).tolist(), strict=True))
    return {**each, "all": right.all(1).float().mean().item()}


def mistakes(verdict: Verdict, scenes: Tensor, most: int = 12) -> list[str]:
    """The commonest errors, as `shape star: circle x3`, of a verdict against scenes `[N, 4]`."""
    found: Counter[str] = Counter()
    for column, name in enumerate(ATTRIBUTES):
        said = getattr(verdict, name)
        for true, seen in zip(scenes[:, column].tolist(), said.tolist(), strict=True):
            if true != seen:
                found[f"{name} {NAMES[name][true]}: {_name(name, seen)}"] += 1
    return [f"{text} x{count}" for text, count in found.most_common(most)]


def describe(verdict: Verdict, row: int) -> str:
    """What one chunk was judged to show, in words."""
    return " ".join(_name(name, int(getattr(verdict, name)[row])) for name in ATTRIBUTES)


def _name(attribute: str, row: int) -> str:
    return NAMES[attribute][row] if row >= 0 else "nothing"


@dataclass(frozen=True)
class Strip:
    """One line of a contact sheet: pictures `[n, 3, H, W]` in [0, 1] under a caption; `good` tints the caption."""

    caption: str
    pictures: Tensor
    good: bool = True


def contact_sheet(path: Path, strips: Sequence[Strip]) -> None:
    """Write the strips, one under the other, as a PNG."""
    size = strips[0].pictures.shape[-1]
    columns = max(len(strip.pictures) for strip in strips)
    height = LINE + size + GAP
    sheet = Image.new("RGB", (columns * (size + GAP) + GAP, len(strips) * height + GAP), (24, 24, 28))
    pen = ImageDraw.Draw(sheet)
    for row, strip in enumerate(strips):
        top = row * height + GAP
        pen.text((GAP, top), strip.caption, fill=(150, 220, 150) if strip.good else (255, 120, 110))
        pixels = (strip.pictures.float().clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1)
        for column, picture in enumerate(pixels.numpy()):
            sheet.paste(Image.fromarray(picture), (GAP + column * (size + GAP), top + LINE))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(256).save(path, optimize=True)  # a quarter of the bytes, and nothing to be seen of it
