"""Rain, snow and wind: patterns that repeat, drawn over everything, and the tint that they give the scenery.

Rain falls, and wind blows, by a quarter of its pattern per frame, so every latent frame of it is alike; snow is the
same again after a chunk.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from streamdiff.models.tiny.scene import WEATHERS
from training.world.painting import apart
from training.world.tracks import FALL, SIZE

PERIOD = {"rain": 64, "snow": 48, "wind": 64}
"""Pixels after which a pattern repeats, downwards, or for wind to the right."""
TINTS: dict[str, tuple[float, float]] = {
    "clear": (1.0, 0.0),
    "rain": (0.78, 0.06),
    "snow": (0.86, 0.11),
    "wind": (1.0, 0.0),
}
"""Factor and addend on the scenery's colors."""
COLOR = {"rain": (0.80, 0.86, 0.95), "snow": (1.0, 1.0, 1.0), "wind": (0.97, 0.98, 0.96)}
DIMMED = torch.tensor([1.0, 0.9, 0.7, 0.95])
"""Of the pattern's color, by day, dusk, night, dawn."""


def pattern(name: str) -> Tensor:
    """Cover `[SIZE, SIZE]` of a weather's pattern at fall 0."""
    axis = torch.arange(SIZE, dtype=torch.float32) + 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    generator = torch.Generator().manual_seed({"rain": 3, "snow": 5, "wind": 8}[name])
    cover, period = torch.zeros(SIZE, SIZE), PERIOD[name]

    if name == "rain":
        for row in range(16):
            cy, jitter = torch.rand(2, generator=generator).tolist()
            dy, dx = apart(y, cy * period, period), apart(x, (row + 0.2 + 0.6 * jitter) * SIZE / 16, SIZE)
            streak = torch.exp(-((dx + 0.12 * dy) ** 2) / (2 * 1.1**2)) * ((13 - dy.abs()) / 6).clamp(0, 1)
            cover = torch.maximum(cover, 0.55 * streak)
    elif name == "snow":
        for row in range(14):
            cy, jitter, big = torch.rand(3, generator=generator).tolist()
            dy, dx = apart(y, cy * period, period), apart(x, (row + 0.15 + 0.7 * jitter) * SIZE / 14, SIZE)
            cover = torch.maximum(cover, 0.95 * (2.6 + 2.0 * big - torch.hypot(dy, dx) + 0.5).clamp(0, 1))
    else:
        for row in range(9):
            cx, jitter = torch.rand(2, generator=generator).tolist()
            dx, dy = apart(x, cx * period, period), apart(y, (row + 0.2 + 0.6 * jitter) * SIZE / 9, SIZE)
            bent = dy + 3.0 * torch.sin(dx * 2 * torch.pi / period)
            streak = torch.exp(-(bent**2) / (2 * 1.3**2)) * ((22 - dx.abs()) / 12).clamp(0, 1)
            cover = torch.maximum(cover, 0.6 * streak)
    return cover


@cache
def _strips(device: str) -> dict[str, Tensor]:
    """Patterns laid on by one period, so that a slice is any phase of them."""
    made = {}
    for name in COLOR:
        cover, along = pattern(name), 1 if name == "wind" else 0
        more = torch.cat([cover.narrow(along, 0, PERIOD[name]), cover], along)
        made[name] = more.to(device)
    return made


def cover(weather: int, fall: int, device: str = "cpu") -> Tensor | None:
    """Cover `[SIZE, SIZE]` of the weather (row of `WEATHERS`) at `fall`, a view; None when it is clear."""
    name = WEATHERS[weather]
    if name == "clear":
        return None
    steps, period = FALL if name == "snow" else 4, PERIOD[name]
    shift = period - (fall % steps) * (period // steps)
    strip = _strips(device)[name]
    return strip[:, shift : shift + SIZE] if name == "wind" else strip[shift : shift + SIZE]


def color(weather: int, light: Tensor) -> Tensor:
    """RGB `[3]` of the pattern under `light` `[4]`."""
    return torch.tensor(COLOR[WEATHERS[weather]], device=light.device) * (light @ DIMMED.to(light.device))


def falling(kinds: Tensor, fall: Tensor, light: Tensor) -> tuple[Tensor, Tensor]:
    """Colors `[N, 3]` and covers `[N, SIZE, SIZE]` of N frames at once, on the device of `light` `[N, 4]`; kinds (rows
    of `WEATHERS`) and fall int64 `[N]` on the CPU. The cover is 0 where it is clear."""
    device = light.device
    covers = torch.zeros(len(kinds), SIZE, SIZE, device=device)
    table = torch.tensor([COLOR.get(name, (0.0, 0.0, 0.0)) for name in WEATHERS], device=device)
    for name, strip in _strips(str(device)).items():
        rows = (kinds == WEATHERS.index(name)).nonzero()[:, 0]
        steps, period = FALL if name == "snow" else 4, PERIOD[name]
        shift = period - fall[rows].remainder(steps) * (period // steps)
        along = (shift[:, None] + torch.arange(SIZE)).to(device)
        covers[rows.to(device)] = strip[:, along].transpose(0, 1) if name == "wind" else strip[along]
    return table[kinds.to(device)] * (light @ DIMMED.to(device))[:, None], covers
