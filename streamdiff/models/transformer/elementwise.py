"""Element-wise functions as single kernels where torch has them, whatever the dtypes."""

from __future__ import annotations

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor


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
