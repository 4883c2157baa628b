"""The procedural world the embedded model is trained on: coloured shapes that move over painted backgrounds.

Everything here is a pure function of a `Scene`, so truth is known for every pixel: training renders its data on the
fly and the quality benchmark checks generated video against it. Knows nothing about autoencoders or transformers.

Geometry: pictures are `SIZE` x `SIZE`; a shape moves `SPEED` pixels per frame and wraps around at the borders (a
torus), so after the four frames of a latent frame it has moved `LATTICE` pixels, one cell of the latent grid. A
stream starts with the shape at the centre. Every latent frame therefore starts on a lattice of 16 x 16 positions,
and the next chunk follows from the previous one and the prompt alone.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

SIZE = 128
SPEED = 2
FRAMES_PER_LATENT = 4
LATTICE = SPEED * FRAMES_PER_LATENT
CELLS = SIZE // LATTICE
RADIUS = 23.0

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.89, 0.18, 0.20),
    "orange": (0.98, 0.55, 0.10),
    "yellow": (0.99, 0.87, 0.20),
    "green": (0.16, 0.72, 0.34),
    "blue": (0.16, 0.38, 0.95),
    "purple": (0.60, 0.26, 0.86),
    "white": (0.97, 0.97, 0.97),
}
SHAPES = ("circle", "square", "triangle", "star", "heart")
BACKGROUNDS = ("night", "sky", "meadow", "desert", "sunset")
MOTIONS: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "still": (0, 0),
}
COLOR_NAMES = tuple(COLORS)
MOTION_NAMES = tuple(MOTIONS)
ATTRIBUTES = (COLOR_NAMES, SHAPES, MOTION_NAMES, BACKGROUNDS)
"""Of a scene, in the order of its fields."""


@dataclass(frozen=True)
class Scene:
    """The content of a picture, as a prompt states it. Fields are names from the tables above."""

    color: str
    shape: str
    motion: str
    background: str

    def indices(self) -> tuple[int, ...]:
        """Row of each field in its table: (color, shape, motion, background)."""
        return tuple(table.index(name) for table, name in zip(ATTRIBUTES, astuple(self), strict=True))


def all_scenes() -> list[Scene]:
    """Every scene the world knows, in a fixed order."""
    return [Scene(*names[::-1]) for names in product(*ATTRIBUTES[::-1])]


def _grid(size: int) -> tuple[Tensor, Tensor]:
    axis = (torch.arange(size, dtype=torch.float64) + 0.5) * (SIZE / size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return y, x


def _mix(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return a + (b - a) * weight


def _rgb(r: float, g: float, b: float) -> Tensor:
    return torch.tensor([r, g, b], dtype=torch.float64).view(3, 1, 1)


def _vertical(y: Tensor, *stops: Tensor) -> Tensor:
    """A smooth vertical gradient through `stops`, top to bottom."""
    position = (y / SIZE).clamp(0, 1) * (len(stops) - 1)
    picture = stops[0].expand(3, *y.shape)
    for index in range(len(stops) - 1):
        picture = _mix(picture, stops[index + 1], (position - index).clamp(0, 1))
    return picture


def _blob(y: Tensor, x: Tensor, cy: float, cx: float, ry: float, rx: float) -> Tensor:
    return torch.exp(-(((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2))


def _disc(y: Tensor, x: Tensor, cy: float, cx: float, radius: float, soft: float = 1.5) -> Tensor:
    return torch.sigmoid((radius - torch.hypot(y - cy, x - cx)) / soft * 2)


def _below(y: Tensor, line: Tensor, soft: float = 1.5) -> Tensor:
    return torch.sigmoid((y - line) / soft * 2)


def _night(y: Tensor, x: Tensor) -> Tensor:
    picture = _vertical(y, _rgb(0.03, 0.04, 0.13), _rgb(0.07, 0.09, 0.27), _rgb(0.18, 0.15, 0.38))
    generator = torch.Generator().manual_seed(7)
    for cy, cx, light in torch.rand(18, 3, generator=generator, dtype=torch.float64).tolist():
        glow = _blob(y, x, 4 + cy * 100, 4 + cx * 120, 1.7, 1.7) * (0.45 + 0.55 * light)
        picture = _mix(picture, _rgb(0.95, 0.95, 0.85), glow)
    picture = _mix(picture, _rgb(0.55, 0.55, 0.75), 0.35 * _blob(y, x, 26, 100, 22, 22))
    return _mix(picture, _rgb(0.96, 0.94, 0.82), _disc(y, x, 26, 100, 9))


def _sky(y: Tensor, x: Tensor) -> Tensor:
    picture = _vertical(y, _rgb(0.26, 0.56, 0.90), _rgb(0.50, 0.75, 0.96), _rgb(0.80, 0.91, 0.98))
    cloud = torch.zeros_like(y)
    for cy, cx, scale in ((30, 28, 1.0), (52, 96, 1.25), (96, 44, 1.1)):
        for dy, dx, r in ((0, 0, 9), (3, -12, 7), (3, 12, 7), (-4, 5, 7)):
            cloud = cloud + _blob(y, x, cy + dy * scale, cx + dx * scale, r * scale * 0.8, r * scale)
    return _mix(picture, _rgb(1.0, 1.0, 1.0), 0.9 * (1 - torch.exp(-1.6 * cloud)))


def _meadow(y: Tensor, x: Tensor) -> Tensor:
    picture = _vertical(y, _rgb(0.66, 0.87, 0.96), _rgb(0.93, 0.96, 0.84), _rgb(0.93, 0.96, 0.84))
    far = 70 + 7 * torch.sin(x / SIZE * 6.283 + 0.6)
    near = 92 + 9 * torch.sin(x / SIZE * 6.283 + 3.4)
    picture = _mix(picture, _rgb(0.55, 0.77, 0.42), _below(y, far))
    grass = _mix(_rgb(0.36, 0.63, 0.27), _rgb(0.22, 0.46, 0.20), ((y - 85) / 45).clamp(0, 1))
    return _mix(picture, grass, _below(y, near))


def _desert(y: Tensor, x: Tensor) -> Tensor:
    picture = _vertical(y, _rgb(0.98, 0.80, 0.55), _rgb(1.0, 0.92, 0.74), _rgb(1.0, 0.92, 0.74))
    picture = _mix(picture, _rgb(1.0, 1.0, 0.9), 0.6 * _blob(y, x, 28, 30, 20, 20))
    picture = _mix(picture, _rgb(1.0, 0.99, 0.90), _disc(y, x, 28, 30, 11))
    far = 78 + 10 * torch.sin(x / SIZE * 6.283 + 1.8)
    near = 98 + 9 * torch.sin(x / SIZE * 6.283 + 4.9)
    picture = _mix(picture, _rgb(0.90, 0.69, 0.42), _below(y, far))
    return _mix(
        picture, _mix(_rgb(0.80, 0.55, 0.31), _rgb(0.63, 0.40, 0.23), ((y - 95) / 33).clamp(0, 1)), _below(y, near)
    )


def _sunset(y: Tensor, x: Tensor) -> Tensor:
    picture = _vertical(y, _rgb(0.26, 0.16, 0.42), _rgb(0.78, 0.30, 0.45), _rgb(0.99, 0.66, 0.36), _rgb(1.0, 0.80, 0.5))
    picture = _mix(picture, _rgb(1.0, 0.92, 0.62), _disc(y, x, 84, 64, 20))
    water = _vertical((y - 88) / 40 * SIZE, _rgb(0.55, 0.25, 0.42), _rgb(0.17, 0.11, 0.30))
    shine = torch.exp(-(((x - 64) / 16) ** 2)) * (0.45 + 0.35 * torch.sin(y * 0.75)) * (1 - (y - 88) / 55).clamp(0, 1)
    return _mix(picture, _mix(water, _rgb(1.0, 0.72, 0.42), 0.8 * shine), _below(y, torch.full_like(y, 88.0)))


_PAINTERS = {"night": _night, "sky": _sky, "meadow": _meadow, "desert": _desert, "sunset": _sunset}


def inside(shape: str, y: Tensor, x: Tensor, r: float, valley: float, low: float) -> Tensor:
    """Signed distance-like field of `shape` of radius `r` around the origin, positive inside, in pixels: a star's
    valleys lie at `valley` radii, a heart's middle `low` pixels below the origin."""
    if shape == "circle":
        return r - torch.hypot(y, x)
    if shape == "square":
        return r * 0.86 - torch.maximum(y.abs(), x.abs())
    if shape == "triangle":
        return torch.minimum(r * 0.70 - y, (y + r * 1.22 - x.abs() * 1.80) / 2.06)
    if shape == "star":
        fold = (torch.atan2(x, -y) + torch.pi / 5).remainder(2 * torch.pi / 5) - torch.pi / 5
        distance = torch.hypot(y, x)
        across, along = distance * fold.abs().sin(), distance * fold.cos()
        turn = torch.tensor(torch.pi / 5)
        edge_y, edge_x = r * valley * turn.cos() - r * 1.18, r * valley * turn.sin()
        return (edge_y * across - edge_x * (along - r * 1.18)) / torch.hypot(edge_y, edge_x)
    if shape == "heart":
        # A square on its tip with a circle on each of its upper sides.
        side, y = r * 0.98, y - low
        point = (side - y.abs() - x.abs()) / 2**0.5
        lobes = side / 2**0.5 - torch.hypot(y + side / 2, x.abs() - side / 2)
        return torch.maximum(point, lobes)
    raise ValueError(f"unknown shape {shape!r}; the world knows {', '.join(SHAPES)}")


@dataclass(frozen=True)
class Palette:
    """Everything rendering looks up, on one device.

    backgrounds `[backgrounds, 3, SIZE, SIZE]`, alpha `[shapes, SIZE, SIZE]` and sprites `[colors, shapes, 3, SIZE,
    SIZE]` are float32 in [0, 1]; sprites and alpha are drawn around the centre of the picture.
    """

    backgrounds: Tensor
    alpha: Tensor
    sprites: Tensor


@cache
def palette(device: str = "cpu") -> Palette:
    """Paint the world once per device (a second on a CPU) at four times the resolution and average down."""
    y, x = _grid(SIZE * 4)

    def down(picture: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(picture, 4)

    backgrounds = torch.stack([down(_PAINTERS[name](y, x)) for name in BACKGROUNDS])
    fields = torch.stack([inside(name, y - SIZE / 2, x - SIZE / 2, RADIUS, 0.52, 2.0) for name in SHAPES])
    cover = (fields > 0).double()
    alpha = down(cover)
    rim = ((fields - 1.5) / 3.0).clamp(0, 1)
    light = 1.0 - 0.3 * torch.hypot(y - SIZE / 2 + 9, x - SIZE / 2 + 9) / 45
    sprites = []
    for rgb in COLORS.values():
        body = _rgb(*rgb).unsqueeze(0) * light * (0.55 + 0.45 * rim.unsqueeze(1))
        sprites.append(down(body * cover.unsqueeze(1)) / alpha.unsqueeze(1).clamp(min=1e-6))
    return Palette(
        backgrounds.clamp(0, 1).float().to(device),
        alpha.float().to(device),
        torch.stack(sprites).clamp(0, 1).float().to(device),
    )


Crop = tuple[Tensor, Tensor, int]


def _window(background: Tensor, crop: Crop | None) -> tuple[Tensor, Tensor]:
    """Rows `[N, H]` and columns `[N, W]` of the picture that a crop shows."""
    if crop is None:
        origin = torch.zeros_like(background)
        crop = (origin, origin, SIZE)
    top, left, size = crop
    span = torch.arange(size, device=background.device)
    return top[:, None] + span, left[:, None] + span


def render(color: Tensor, shape: Tensor, background: Tensor, y: Tensor, x: Tensor, crop: Crop | None = None) -> Tensor:
    """Render N pictures.

    Args:
        color, shape, background: int64 `[N]`, rows of the tables above.
        y, x: int64 `[N]`, centre of the shape in pixels, any integer (wraps around).
        crop: optional (top int64 `[N]`, left int64 `[N]`, size): render only this window of each picture.

    Returns:
        float32 `[N, 3, H, W]` in [0, 1], H = W = SIZE or the crop's size.
    """
    look = palette(str(color.device))
    rows, cols = _window(background, crop)
    sprite_rows = (rows - y[:, None] + SIZE // 2).remainder(SIZE)[:, :, None]
    sprite_cols = (cols - x[:, None] + SIZE // 2).remainder(SIZE)[:, None, :]
    alpha = look.alpha[shape[:, None, None], sprite_rows, sprite_cols].unsqueeze(1)
    channel = torch.arange(3, device=color.device).view(1, 3, 1, 1)
    sprite = look.sprites[
        color.view(-1, 1, 1, 1), shape.view(-1, 1, 1, 1), channel, sprite_rows.unsqueeze(1), sprite_cols.unsqueeze(1)
    ]
    scene = empty(background, crop)
    return scene + (sprite - scene) * alpha


def empty(background: Tensor, crop: Crop | None = None) -> Tensor:
    """The same pictures without their shapes; arguments and result as for `render`."""
    rows, cols = _window(background, crop)
    channel = torch.arange(3, device=background.device).view(1, 3, 1, 1)
    backgrounds = palette(str(background.device)).backgrounds
    return backgrounds[background.view(-1, 1, 1, 1), channel, rows[:, None, :, None], cols[:, None, None, :]]


def velocities(device: str = "cpu") -> Tensor:
    """int64 `[motions, 2]`: (y, x) pixels per frame of each motion, in the order of `MOTION_NAMES`."""
    return torch.tensor([[dy * SPEED, dx * SPEED] for dx, dy in MOTIONS.values()], device=device)
