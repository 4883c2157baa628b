"""The scenery, painted once: a sky that stands still and two layers that scroll, for every place and hour.

Pure functions of a name; pictures are float32 in [0, 1]. Layers repeat after `SIZE` pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.models.tiny.scene import PLACES
from training.world.tracks import SIZE

LIGHTS = ("day", "dusk", "night", "dawn")
FINE = 2
TURN = 2 * torch.pi / SIZE
_TINT = {"day": (1.0, 1.0, 1.0), "dusk": (0.95, 0.70, 0.60), "night": (0.30, 0.34, 0.55), "dawn": (0.88, 0.80, 0.90)}
_SKY = {
    "day": ((0.25, 0.55, 0.92), (0.52, 0.77, 0.97), (0.84, 0.93, 0.98)),
    "dusk": ((0.26, 0.17, 0.44), (0.80, 0.33, 0.44), (0.99, 0.70, 0.40)),
    "night": ((0.02, 0.03, 0.11), (0.06, 0.08, 0.25), (0.14, 0.14, 0.36)),
    "dawn": ((0.45, 0.58, 0.86), (0.86, 0.72, 0.84), (0.99, 0.86, 0.72)),
}
Color = tuple[float, float, float]


def _axes() -> tuple[Tensor, Tensor]:
    axis = (torch.arange(SIZE * FINE, dtype=torch.float32) + 0.5) / FINE
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return y, x


def _rgb(color: Color) -> Tensor:
    return torch.tensor(color).view(3, 1, 1)


def _down(picture: Tensor) -> Tensor:
    return F.avg_pool2d(picture[None], FINE)[0]


def apart(value: Tensor, center: float, period: float = SIZE) -> Tensor:
    """Distance from `center` along an axis that repeats after `period`, the short way around."""
    return (value - center + period / 2).remainder(period) - period / 2


def _soft(inside: Tensor, edge: float = 1.0) -> Tensor:
    """Cover of what is inside where `inside` (pixels) is positive."""
    return torch.sigmoid(inside * 2 / edge)


def _blob(y: Tensor, x: Tensor, cy: float, cx: float, ry: float, rx: float) -> Tensor:
    return torch.exp(-(((y - cy) / ry) ** 2 + (apart(x, cx) / rx) ** 2))


def sky(light: str) -> Tensor:
    """What stands still behind everything, `[3, SIZE, SIZE]`: a gradient, sun or moon, stars."""
    y, x = _axes()
    stops = [_rgb(color) for color in _SKY[light]]
    height = (y / (SIZE * 0.78)).clamp(0, 1) * 2
    picture = torch.lerp(stops[0], stops[1], height.clamp(0, 1)) + (stops[2] - stops[1]) * (height - 1).clamp(0, 1)
    disc = {"day": (44, 200, 17), "dusk": (128, 208, 26), "night": (46, 200, 18), "dawn": (132, 48, 24)}[light]
    glow = _rgb((0.75, 0.78, 0.95) if light == "night" else (1.0, 0.95, 0.75))
    picture = torch.lerp(picture, glow, 0.45 * _blob(y, x, disc[0], disc[1], disc[2] * 2.2, disc[2] * 2.2))
    face = _soft(disc[2] - torch.hypot(y - disc[0], x - disc[1]))
    if light == "night":
        for cy, cx, bright in torch.rand(26, 3, generator=torch.Generator().manual_seed(7)).tolist():
            star = _blob(y, x, 6 + cy * 130, cx * SIZE, 2.0, 2.0) * (0.5 + 0.5 * bright)
            picture = torch.lerp(picture, _rgb((0.95, 0.95, 0.88)), star)
        crater = _blob(y, x, 42, 195, 5, 5) + _blob(y, x, 54, 206, 4, 4)
        return _down(torch.lerp(picture, _rgb((0.95, 0.93, 0.82)) - 0.12 * crater, face))
    return _down(torch.lerp(picture, _rgb((1.0, 0.97, 0.82)), face))


@dataclass(frozen=True)
class Layer:
    """One scrolling layer by day: color `[3, H, W]`, cover `[H, W]`, and what shines by itself at night `[H, W]`."""

    color: Tensor
    cover: Tensor
    glow: Tensor | None = None


def _meadow(y: Tensor, x: Tensor) -> tuple[Layer, Layer]:
    ridge = 150 + 13 * torch.sin(TURN * x + 0.6) + 6 * torch.sin(3 * TURN * x + 2.0)
    far = torch.lerp(_rgb((0.56, 0.78, 0.46)), _rgb((0.42, 0.66, 0.36)), ((y - 140) / 50).clamp(0, 1))
    edge = 196 + 9 * torch.sin(TURN * x + 3.4)
    grass = torch.lerp(_rgb((0.34, 0.62, 0.26)), _rgb((0.18, 0.42, 0.18)), ((y - 190) / 60).clamp(0, 1))
    cover = _soft(y - edge)
    for cx, radius in ((36, 20), (60, 15), (170, 23), (226, 13)):
        bush = _soft(radius - torch.hypot((y - 200) * 1.25, apart(x, cx)))
        grass = torch.lerp(grass, _rgb((0.16, 0.45, 0.20)), bush)
        cover = torch.maximum(cover, bush)
    for cy, cx, color in ((222, 20, 0), (236, 92, 1), (226, 128, 0), (240, 196, 1), (220, 210, 0), (238, 246, 1)):
        petal = _rgb(((0.98, 0.92, 0.96), (0.99, 0.78, 0.30))[color])
        grass = torch.lerp(grass, petal, _soft(4.0 - torch.hypot(y - cy, apart(x, cx))))
    return Layer(far, _soft(y - ridge)), Layer(grass, cover)


def _desert(y: Tensor, x: Tensor) -> tuple[Layer, Layer]:
    base = 168 + 5 * torch.sin(2 * TURN * x + 1.0)
    far = _rgb((0.88, 0.66, 0.42)).expand(3, *y.shape)
    cover = _soft(y - base)
    for cx, peak in ((70, 104), (186, 130)):
        side = apart(x, cx)
        stone = torch.lerp(_rgb((0.84, 0.58, 0.36)), _rgb((0.68, 0.44, 0.28)), _soft(side, 3.0))
        pyramid = _soft((y - peak) * 0.75 - side.abs(), 2.0)
        far = torch.lerp(far, stone, pyramid * (1 - cover))
        cover = torch.maximum(cover, pyramid)
    edge = 204 + 10 * torch.sin(TURN * x + 1.9) + 3 * torch.sin(3 * TURN * x)
    sand = torch.lerp(_rgb((0.93, 0.75, 0.47)), _rgb((0.72, 0.50, 0.29)), ((y - 198) / 58).clamp(0, 1))
    near = _soft(y - edge)
    for cx, height in ((40, 46), (150, 34), (214, 52)):
        side = apart(x, cx)
        trunk = _soft(torch.minimum(6 - side.abs(), y - (222 - height)).minimum(226 - y))
        arm = _soft(torch.minimum(4 - (side - 14).abs(), y - (218 - height * 0.75)).minimum(204 - height * 0.2 - y))
        joint = _soft(torch.minimum(4 - (y - (204 - height * 0.2)).abs(), side).minimum(18 - side))
        cactus = torch.maximum(trunk, torch.maximum(arm, joint))
        sand = torch.lerp(sand, _rgb((0.24, 0.50, 0.28)), cactus)
        near = torch.maximum(near, cactus)
    return Layer(far, cover), Layer(sand, near)


def _sea(y: Tensor, x: Tensor) -> tuple[Layer, Layer]:
    water = torch.lerp(_rgb((0.36, 0.68, 0.84)), _rgb((0.12, 0.38, 0.64)), ((y - 160) / 60).clamp(0, 1))
    cover = _soft(y - 162)
    for cx, width, height in ((58, 46, 28), (176, 30, 18)):
        island = _soft(height * (1 - (apart(x, cx) / width) ** 2) - (162 - y), 2.0) * _soft(163 - y)
        water = torch.lerp(water, _rgb((0.40, 0.56, 0.36)), island)
        cover = torch.maximum(cover, island)
    edge = 204 + 6 * torch.sin(4 * TURN * x)
    wave = torch.lerp(_rgb((0.14, 0.44, 0.70)), _rgb((0.05, 0.22, 0.46)), ((y - 200) / 56).clamp(0, 1))
    foam = torch.exp(-(((y - edge - 3) / 3) ** 2)) * 0.8
    second = 230 + 6 * torch.sin(4 * TURN * x + 2.4)
    foam = torch.maximum(foam, torch.exp(-(((y - second) / 2.5) ** 2)) * 0.5)
    wave = torch.lerp(wave, _rgb((0.93, 0.98, 1.0)), foam)
    near = _soft(y - edge)
    side = apart(x, 128)
    hull = _soft(torch.minimum(y - 190, 208 - y).minimum(27 - side.abs() - (y - 190) * 0.6))
    sail = _soft(torch.minimum(188 - y, (y - 148) * 0.55 - side).minimum(side + 1))
    wave = torch.lerp(torch.lerp(wave, _rgb((0.52, 0.28, 0.18)), hull), _rgb((0.98, 0.97, 0.92)), sail)
    return Layer(water, cover), Layer(wave, torch.maximum(near, torch.maximum(hull, sail)))


def _sky_place(y: Tensor, x: Tensor) -> tuple[Layer, Layer]:
    def clouds(places: tuple[tuple[float, float, float], ...]) -> Tensor:
        dense = torch.zeros_like(y)
        for cy, cx, scale in places:
            for dy, dx, radius in ((0, 0, 20), (6, -25, 14), (6, 25, 15), (-8, 9, 15)):
                dense = dense + _blob(y, x, cy + dy * scale, cx + dx * scale, radius * scale * 0.75, radius * scale)
        return 1 - torch.exp(-2.0 * dense.square())

    far = clouds(((70, 50, 0.7), (120, 180, 0.8), (160, 80, 0.7)))
    near = clouds(((196, 200, 1.2), (40, 120, 0.9), (226, 70, 1.3)))
    shade = torch.lerp(_rgb((0.97, 0.98, 1.0)), _rgb((0.82, 0.88, 0.96)), ((y - 20) / 200).clamp(0, 1))
    return Layer(shade * 0.96, far * 0.7), Layer(torch.lerp(shade, _rgb((1.0, 1.0, 1.0)), near), near * 0.95)


def _city(y: Tensor, x: Tensor) -> tuple[Layer, Layer]:
    cover, color = torch.zeros_like(y), _rgb((0.52, 0.56, 0.66)).expand(3, *y.shape)
    glow = torch.zeros_like(y)
    skyline = ((20, 22, 118), (62, 18, 142), (102, 20, 96), (146, 22, 128), (188, 18, 108), (230, 20, 136))
    for index, (cx, half, top) in enumerate(skyline):
        side = apart(x, cx)
        house = _soft(torch.minimum(half - side.abs(), y - top))
        wall = ((0.50, 0.54, 0.66), (0.60, 0.52, 0.54), (0.44, 0.52, 0.60))[index % 3]
        pane_y, pane_x = ((y - top).remainder(20) - 12).abs(), ((side + half).remainder(14) - 9).abs()
        pane = _soft(torch.minimum(5 - pane_y, 3.2 - pane_x)) * _soft(half - 3 - side.abs()) * _soft(y - top - 4)
        color = torch.lerp(color, torch.lerp(_rgb(wall), _rgb((0.78, 0.88, 0.96)), pane), house)
        glow, cover = torch.maximum(glow * (1 - house), pane * house), torch.maximum(cover, house)
    street = torch.lerp(_rgb((0.46, 0.64, 0.40)), _rgb((0.36, 0.37, 0.42)), _soft(y - 226))
    line = _soft(torch.minimum(2.5 - (y - 241).abs(), 11 - (x.remainder(64) - 32).abs()))
    street = torch.lerp(street, _rgb((0.93, 0.92, 0.84)), line)
    near = _soft(y - 208)
    for cx in (40, 128, 216):
        side = apart(x, cx)
        trunk = _soft(torch.minimum(3.5 - side.abs(), torch.minimum(y - 190, 218 - y)))
        crown = _soft(19 - torch.hypot(y - 184, side))
        street = torch.lerp(torch.lerp(street, _rgb((0.40, 0.28, 0.20)), trunk), _rgb((0.20, 0.50, 0.26)), crown)
        near = torch.maximum(near, torch.maximum(trunk, crown))
    return Layer(color, cover, glow), Layer(street, near)


_PAINTERS: dict[str, Callable[[Tensor, Tensor], tuple[Layer, Layer]]] = {
    "meadow": _meadow,
    "desert": _desert,
    "sea": _sea,
    "sky": _sky_place,
    "city": _city,
}


@dataclass(frozen=True)
class Scenery:
    """All pictures on one device. A layer is laid twice side by side, so that a slice of it is any scroll of it.

    sky `[4, 3, SIZE, SIZE]`; ink `[places, 2, 4, 3, SIZE, 2 * SIZE]`: colors of the far and the near layer under each
    light, times their cover; bare `[places, 2, SIZE, 2 * SIZE]`: one less the cover. top `[places][2]`: the first row
    that the layer touches.
    """

    sky: Tensor
    ink: Tensor
    bare: Tensor
    top: tuple[tuple[int, int], ...]


@cache
def scenery(device: str = "cpu") -> Scenery:
    """Paint everything, once per device (a few seconds on a CPU)."""
    y, x = _axes()
    ink, bare, tops = [], [], []
    for place in PLACES:
        inks, bares, top = [], [], []
        for layer in _PAINTERS[place](y, x):
            cover = layer.cover.clamp(0, 1)
            lit = []
            for light in LIGHTS:
                color = layer.color * _rgb(_TINT[light])
                if layer.glow is not None and light in ("night", "dusk"):
                    color = torch.lerp(color, _rgb((0.98, 0.85, 0.48)), layer.glow * (0.9 if light == "night" else 0.6))
                lit.append(_down(color * cover).repeat(1, 1, 2))
            small = _down(cover[None])[0]
            inks.append(torch.stack(lit))
            bares.append((1 - small).repeat(1, 2))
            top.append(int((small.amax(1) > 0.002).nonzero()[0]))
        ink.append(torch.stack(inks))
        bare.append(torch.stack(bares))
        tops.append((top[0], top[1]))
    skies = torch.stack([sky(light) for light in LIGHTS])
    every = [t.clamp(0, 1).to(device) for t in (skies, torch.stack(ink), torch.stack(bare))]
    return Scenery(every[0], every[1], every[2], tuple(tops))
