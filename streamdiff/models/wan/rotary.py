"""3-D rotary positions as in Wan2.1, computed for any positions instead of read from a table of 1,024 rows."""

from __future__ import annotations

import torch
from torch import Tensor

THETA = 10000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """How Wan splits a head's channels over (time, height, width)."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def table(frames: Tensor, height: int, width: int, head_dim: int) -> Tensor:
    """Rotary factors of all tokens of frames at the given temporal positions.

    Args:
        frames: positions of latent frames, `[..., F]`, any integers.
        height, width: tokens per latent frame.

    Returns:
        complex64 `[..., F * height * width, 1, head_dim / 2]` of modulus 1, time outermost as in Wan's token order.
    """
    time_dim, height_dim, width_dim = axis_dims(head_dim)
    device = frames.device

    def angles(positions: Tensor, dim: int) -> Tensor:
        steps = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        return positions.double()[..., None] * THETA**-steps

    lead = frames.shape[:-1]
    grid = (*lead, frames.shape[-1], height, width)
    t = angles(frames, time_dim)[..., :, None, None, :].expand(*grid, -1)
    h = angles(torch.arange(height, device=device), height_dim)[:, None, :].expand(*grid, -1)
    w = angles(torch.arange(width, device=device), width_dim).expand(*grid, -1)
    angle = torch.cat([t, h, w], -1).flatten(-4, -2).unsqueeze(-2)
    return torch.complex(angle.cos().float(), angle.sin().float())


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Turn each interleaved pair of channels of `x` `[..., tokens, heads, head_dim]` by its token's factor.

    One complex product: on a CPU seven times faster than the same in four real ones.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).type_as(x)
