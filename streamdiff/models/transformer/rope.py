"""3-D rotary positions as in Wan2.1, computed for any positions instead of read from a table of 1,024 rows; and the
element-wise functions of a block as single kernels where torch has them, whatever the dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.device import upload


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)): torch's kernel for it is slow on CPUs."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.gelu(x, approximate="tanh")
    twice = 2 * (2 / pi) ** 0.5
    return torch.square(x).mul_(0.044715 * twice).add_(twice).mul_(x).sigmoid_().mul_(x)


def multiply_add(addend: Tensor, one: Tensor, other: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`addend + one * other`, computed in float32 and rounded once to `dtype`; into `out`, which has that dtype, where
    it is given. At least one factor or the addend is float32; `one` has the shape of the result."""
    if out is None and (dtype is torch.float32 or torch.compiler.is_compiling() or torch.is_grad_enabled()):
        return torch.addcmul(addend, one, other).to(dtype)
    return torch.addcmul(addend, one, other, out=torch.empty_like(one, dtype=dtype) if out is None else out)


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
    time = _factors(frames, axis_dims(head_dim)[0])
    return _join(time, _plane(height, width, head_dim, frames.device))


class Grid:
    """The same as `table`, on `device`, with everything computed once that does not depend on the frames."""

    def __init__(self, height: int, width: int, head_dim: int, device: torch.device) -> None:
        self.device, self._time_dim = device, axis_dims(head_dim)[0]
        self._plane = _plane(height, width, head_dim, device)

    def factors(self, frames: Sequence[int]) -> Tensor:
        """See `table`; `frames` are F positions. Never waits for the device."""
        return _join(upload(_factors(torch.tensor(frames), self._time_dim), self.device), self._plane)


def matrices(factors: Tensor) -> Tensor:
    """Complex `factors` `[..., n]` as real matrices `[2, ..., n, 2]`: what a pair's first number is multiplied with,
    and its second."""
    return torch.stack([torch.view_as_real(factors.resolve_conj()), torch.view_as_real(1j * factors)])


def rotate(x: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """Turn each interleaved pair of channels of `x` `[..., tokens, heads, head_dim]` by its token's factor, in float32.
    Where `out` is given, of that shape and dtype, the result is written there.

    `factors` are complex, or as `matrices` has them. In float32 this is one complex product, on a CPU seven times
    faster than real ones. Elsewhere it is two real products with matrices, which read and round `x` as it is, and which
    a compiler fuses with what stands around.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if not factors.is_complex():
        if x.dtype is not torch.float32 or torch.compiler.is_compiling():
            first, second = factors
            there = None if out is None else out.unflatten(-1, (-1, 2))
            return multiply_add(
                first * pairs[..., :1], pairs[..., 1:].expand_as(pairs), second, x.dtype, there
            ).flatten(-2)
        factors = torch.view_as_complex(factors[0])
    turned = torch.view_as_real(torch.view_as_complex(pairs.float()) * factors).flatten(-2)
    return turned.type_as(x) if out is None else out.copy_(turned)


def _factors(positions: Tensor, dim: int) -> Tensor:
    """complex64 `[..., n, dim / 2]` of one axis at positions `[..., n]`."""
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    angle = positions.double()[..., None] * THETA**-steps
    return torch.complex(angle.cos().float(), angle.sin().float())


def _plane(height: int, width: int, head_dim: int, device: torch.device) -> Tensor:
    """Factors of height and width `[height, width, ...]`, those of any frame."""
    _, height_dim, width_dim = axis_dims(head_dim)
    h = _factors(torch.arange(height, device=device), height_dim)[:, None].expand(-1, width, -1)
    w = _factors(torch.arange(width, device=device), width_dim).expand(height, -1, -1)
    return torch.cat([h, w], -1)


def _join(time: Tensor, plane: Tensor) -> Tensor:
    """Factors of time `[..., F, t]` and of the plane `[height, width, p]` for all tokens."""
    height, width, _ = plane.shape
    grid = (*time.shape[:-1], height, width)
    joined = torch.cat([time[..., None, None, :].expand(*grid, -1), plane.expand(*grid, -1)], -1)
    return joined.flatten(-4, -2).unsqueeze(-2)
