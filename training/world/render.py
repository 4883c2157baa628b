"""Draws the frames of a track: scenery, shadows, things, weather. A pure function of the track."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models.tiny.scene import SIZES, WEATHERS
from training.scene_rows import COLUMN
from training.world import shapes, weather
from training.world.painting import Scenery, scenery
from training.world.tracks import SIZE, Track

GROUND = 234
"""Row on which shadows lie."""
SHADOW_REACH = (7.0, 40.0)
"""Half height and half width of the shadow of a large thing, in pixels."""


@dataclass(frozen=True)
class Window:
    """A square part of the picture: first row, first column, side."""

    top: int = 0
    left: int = 0
    side: int = SIZE

    @property
    def slices(self) -> tuple[slice, slice]:
        """Its rows and columns."""
        return slice(self.top, self.top + self.side), slice(self.left, self.left + self.side)


@dataclass(frozen=True)
class Pictures:
    """frames float32 `[N, 3, side, side]` in [0, 1]; things `[N, 1, side, side]`: how much of a pixel things cover."""

    frames: Tensor
    things: Tensor


def render(
    track: Track,
    windows: list[Window] | None = None,
    device: str = "cpu",
    things: bool = True,
    falling: bool = True,
) -> Pictures:
    """Draw every frame of a flat track (`Track.flat`).

    Args:
        windows: for each frame the part that is drawn, all of one side; None: whole pictures.
        things: False leaves out things and their shadows.
        falling: False leaves out rain, snow and wind, but not the tint of the scenery under them.
    """
    count = len(track.scroll)
    windows = windows or [Window()] * count
    side = windows[0].side
    frames = torch.empty(count, 3, side, side, device=device)
    covered = torch.zeros(count, 1, side, side, device=device)
    look, light = scenery(device), track.light.to(device)
    skies = track.scenes[:, [COLUMN[n] for n in ("place", "weather")]].tolist()
    scroll, fall = track.scroll.tolist(), track.fall.tolist()
    sprites = [_sprites(track, thing, light) for thing in (0, 1)] if things else []
    shadow = (light @ shapes.SHADOW.to(device)).tolist()
    shares = track.light.tolist()
    for index, window in enumerate(windows):
        place, kind = skies[index]
        frame = frames[index]
        _scenery(frame, look, place, shares[index], scroll[index], window)
        factor, addend = weather.TINTS[WEATHERS[kind]]
        if factor != 1.0:
            frame.mul_(factor).add_(addend)
        for drawn in sprites:
            if index in drawn:
                sprite = drawn[index]
                cast_shadow(frame, sprite.x, sprite.radius, shadow[index], window)
        for drawn in reversed(sprites):  # the first thing is in front
            if index in drawn:
                _paste(frame, covered[index], drawn[index], window)
        pattern = weather.cover(kind, fall[index], device) if falling else None
        if pattern is not None:
            part = pattern[window.slices]
            frame.lerp_(weather.color(kind, light[index]).view(3, 1, 1).expand_as(frame), part.expand_as(frame))
    return Pictures(frames, covered)


def _scenery(frame: Tensor, look: Scenery, place: int, light: list[float], scroll: int, window: Window) -> None:
    """Fill `frame` `[3, side, side]`. Mutates: frame."""
    rows, cols = window.slices
    hours = [(hour, share) for hour, share in enumerate(light) if share > 0]

    def mix(pictures: list[Tensor], into: Tensor | None) -> Tensor:
        """The pictures, one per hour, by their shares."""
        if len(hours) == 1:
            return into.copy_(pictures[0]) if into is not None else pictures[0]
        first, second = pictures[0], pictures[1]
        made = torch.lerp(first, second, hours[1][1] / (hours[0][1] + hours[1][1]))
        for (_, share), picture in zip(hours[2:], pictures[2:], strict=True):
            made = made * (1 - share) + picture * share
        return into.copy_(made) if into is not None else made

    mix([look.sky[hour, :, rows, cols] for hour, _ in hours], frame)
    for layer, offset in ((0, scroll // 2), (1, scroll)):
        start = max(window.top, look.top[place][layer])
        if start >= window.top + window.side:
            continue
        left = window.left + offset % SIZE
        left -= SIZE if left >= SIZE else 0
        band, across = slice(start, window.top + window.side), slice(left, left + window.side)
        part = frame[:, start - window.top :]
        part.mul_(look.bare[place, layer, band, across])
        part.add_(mix([look.ink[place, layer, hour, :, band, across] for hour, _ in hours], None))


@dataclass(frozen=True)
class _Sprite:
    alpha: Tensor  # [1, s, s]
    rgb: Tensor  # [3, s, s]
    y: int
    x: int
    radius: float


def there(track: Track, thing: int) -> Tensor:
    """Which frames of a flat track have the first or the second thing, bool `[N]`."""
    second = track.scenes[:, COLUMN["second"]] == 1
    return second if thing else torch.ones_like(second)


def sprites_by_size(track: Track, thing: int, light: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The first or the second thing of a flat track by size: its name, the frames int64 `[n]`, on the CPU, that have
    such a thing, and what `shapes.sprites` draws of them; `light` `[N, 4]` says on which device."""
    prefix, device = ("", "second_")[thing], light.device
    looks = [track.scenes[:, COLUMN[prefix + name]] for name in ("color", "shape")]
    for size, name in enumerate(SIZES):
        rows = (there(track, thing) & (track.scenes[:, COLUMN[prefix + "size"]] == size)).nonzero()[:, 0]
        if len(rows):
            color, shape, angle = (value[rows].to(device) for value in (*looks, track.angle[:, thing]))
            yield name, rows, *shapes.sprites(color, shape, size, angle, light[rows.to(device)])


def _sprites(track: Track, thing: int, light: Tensor) -> dict[int, _Sprite]:
    """The first or the second thing of every frame that has it."""
    made: dict[int, _Sprite] = {}
    for name, rows, alpha, rgb in sprites_by_size(track, thing, light):
        places = track.place[rows, thing].tolist()
        for row, index in enumerate(rows.tolist()):
            y, x = places[row]
            made[index] = _Sprite(alpha[row], rgb[row], y, x, shapes.RADIUS[name])
    return made


def _overlaps(center: int, half: int, origin: int, side: int) -> Iterator[tuple[slice, slice]]:
    """Along one axis: where copies of what is centred at `center`, a torus apart, lie in a window: (there, its own)."""
    for shift in (-SIZE, 0, SIZE):
        start = center - half + shift - origin
        low, high = max(0, start), min(side, start + 2 * half + 1)
        if low < high:
            yield slice(low, high), slice(low - start, high - start)


def _paste(frame: Tensor, covered: Tensor, sprite: _Sprite, window: Window) -> None:
    """Draw a thing. Mutates: frame, covered."""
    half = sprite.alpha.shape[-1] // 2
    for rows, own_rows in _overlaps(sprite.y, half, window.top, window.side):
        for cols, own_cols in _overlaps(sprite.x, half, window.left, window.side):
            part, alpha = frame[:, rows, cols], sprite.alpha[:, own_rows, own_cols]
            part.lerp_(sprite.rgb[:, own_rows, own_cols], alpha.expand_as(part))
            over = covered[:, rows, cols]
            torch.maximum(over, alpha, out=over)


def cast_shadow(frame: Tensor, across: int, radius: float, kind: list[float], window: Window | None = None) -> None:
    """Darken the ground of `frame` `[3, side, side]` under a thing at column `across`; `kind` is a mix of the rows of
    `shapes.SHADOW`. Mutates: frame."""
    window = window or Window()
    beside, length, dark = kind
    scale = radius / shapes.RADIUS["large"]
    high, wide = SHADOW_REACH[0] * scale, SHADOW_REACH[1] * scale * length
    half_y, half_x = int(2 * high), int(1.6 * wide)
    y = torch.arange(-half_y, half_y + 1, device=frame.device) / high
    x = torch.arange(-half_x, half_x + 1, device=frame.device) / wide
    away = (y.square()[:, None] + x.square()).sqrt()
    bright = 1 - dark * ((1.25 - away) / 0.5).clamp(0, 1)
    for rows, own_rows in _overlaps(GROUND, half_y, window.top, window.side):
        for cols, own_cols in _overlaps((across + round(beside)) % SIZE, half_x, window.left, window.side):
            frame[:, rows, cols] *= bright[own_rows, own_cols]
