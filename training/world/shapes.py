"""The things themselves: their outline, shading and shadow, computed for any place and angle."""

from __future__ import annotations

import torch
from torch import Tensor

from streamdiff.models.tiny.scene import SHAPES, SIZES
from training.world.tracks import ANGLES

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.89, 0.18, 0.20),
    "orange": (0.98, 0.55, 0.10),
    "yellow": (0.99, 0.87, 0.20),
    "green": (0.16, 0.72, 0.34),
    "blue": (0.16, 0.38, 0.95),
    "purple": (0.60, 0.26, 0.86),
    "white": (0.97, 0.97, 0.97),
}
"""By `scene.COLOR_NAMES`, in their order."""
RADIUS = {"large": 42.0, "small": 28.0}
HALF = {"large": 60, "small": 40}
"""Half the side of the square that holds a thing at any angle; even, so that it halves well."""
VALLEY = 0.54
"""Of a star: how far its valleys lie from the middle, in radii."""
# Of day, dusk, night and dawn: the color of the light on things, and where it comes from (y, x).
TINT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.88, 0.80], [0.74, 0.78, 0.93], [1.0, 0.93, 0.95]])
TOWARDS = torch.tensor([[-1.0, 0.2], [-0.3, 0.95], [-0.8, 0.6], [-0.3, -0.95]])
SHADOW = torch.tensor([[0.0, 1.0, 0.42], [-34.0, 1.6, 0.34], [-14.0, 1.2, 0.22], [34.0, 1.6, 0.30]])
"""Of the same: how far beside its thing a shadow lies, how long it is, and how dark."""


def _inside(shape: str, y: Tensor, x: Tensor, r: float) -> Tensor:
    """Signed distance-like field of `shape` of radius `r` around the origin, positive inside, in pixels."""
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
        edge_y, edge_x = r * VALLEY * turn.cos() - r * 1.18, r * VALLEY * turn.sin()
        return (edge_y * across - edge_x * (along - r * 1.18)) / torch.hypot(edge_y, edge_x)
    if shape == "heart":
        # A square on its tip with a circle on each of its upper sides.
        side, y = r * 0.98, y - r * 0.09
        point = (side - y.abs() - x.abs()) / 2**0.5
        lobes = side / 2**0.5 - torch.hypot(y + side / 2, x.abs() - side / 2)
        return torch.maximum(point, lobes)
    raise ValueError(f"unknown shape {shape!r}; the world knows {', '.join(SHAPES)}")


def stencil(shape: str, size: str, angle: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Things of one shape and size at angles int64 `[N]` (steps of a turn, clockwise).

    Returns:
        alpha `[N, s, s]`, shading without light `[N, s, s]`, and the coordinates y, x `[s, s]` in radii; the centre is
        pixel (HALF, HALF).
    """
    half, r = HALF[size], RADIUS[size]
    axis = torch.arange(-half, half + 1, dtype=torch.float32, device=angle.device)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    turn = (angle * (2 * torch.pi / ANGLES)).view(-1, 1, 1)
    turned_y, turned_x = y * turn.cos() - x * turn.sin(), y * turn.sin() + x * turn.cos()
    field = _inside(shape, turned_y, turned_x, r)
    shading = 0.5 + 0.5 * ((field - r * 0.06) / (r * 0.12)).clamp(0, 1)
    if shape == "circle":  # a stripe, or nobody could see it spin
        shading = shading * (1 - 0.35 * ((r * 0.2 - turned_x.abs()) / 2 + 0.5).clamp(0, 1))
    return (field + 0.5).clamp(0, 1), shading, y / r, x / r


def sprites(color: Tensor, shape: Tensor, size: int, angle: Tensor, light: Tensor) -> tuple[Tensor, Tensor]:
    """Draw N things of one size (row of `SIZES`).

    Args:
        color, shape, angle: int64 `[N]`; light: float32 `[N, 4]`.

    Returns:
        alpha `[N, 1, s, s]` and rgb `[N, 3, s, s]`, not multiplied by alpha.
    """
    device, name = color.device, SIZES[size]
    side = 2 * HALF[name] + 1
    alpha = torch.empty(len(color), side, side, device=device)
    shading = torch.empty_like(alpha)
    for row in shape.unique().tolist():
        chosen = (shape == row).nonzero()[:, 0]
        alpha[chosen], shading[chosen], y, x = stencil(SHAPES[row], name, angle[chosen])
    towards = light @ TOWARDS.to(device)
    lit = 0.88 + 0.16 * (y * towards[:, 0, None, None] + x * towards[:, 1, None, None])
    body = torch.tensor(list(COLORS.values()), device=device)[color] * (light @ TINT.to(device))
    rgb = body[:, :, None, None] * (shading * lit)[:, None]
    return alpha[:, None], rgb.clamp_(0, 1)
