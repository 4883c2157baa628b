"""Which of torch's attention kernels runs, by name, and whether it can be trusted here.

A kernel that is fast and wrong gives a picture of noise and no error (a published one does so on Hopper GPUs), so the
chosen one computes a small case at the start and is compared with the plain formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from streamdiff.errors import ConfigError

KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Names of `model.attention` beside `auto`, which leaves the choice to torch."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_QUERIES, _KEYS = 64, 192


@contextmanager
def selected(name: str) -> Iterator[None]:
    """Attention within runs with this kernel, or not at all."""
    if name == "auto":
        yield
        return
    with sdpa_kernel([KERNELS[name]]):
        yield


def probe(name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Compute a small case with the kernel and compare it with the formula in float64.

    Raises:
        ConfigError: an unknown kernel, one that cannot run here, or one whose numbers are wrong; says by how much.
    """
    if name != "auto" and name not in KERNELS:
        raise ConfigError(f"model.attention is {name!r}; it can be auto, {', '.join(KERNELS)}")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, head_dim, generator=generator).to(device, dtype)
        for tokens in (_QUERIES, _KEYS, _KEYS)
    )
    try:
        with torch.inference_mode(), selected(name):
            got = F.scaled_dot_product_attention(query, key, value)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"attention kernel {name} cannot run here ({device}, {dtype}, head width {head_dim}): {reason}; use auto"
        ) from None
    expected = _plain(query, key, value)
    off = float((got.double().cpu() - expected).norm() / expected.norm())
    if not off <= _TOLERANCE[dtype]:
        raise ConfigError(
            f"attention kernel {name} is wrong here ({device}, {dtype}, head width {head_dim}): off by {off:.3g}, with "
            f"{_TOLERANCE[dtype]:g} allowed; use auto or math"
        )


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula, in float64 on the CPU."""
    q, k, v = (x.double().cpu() for x in (query, key, value))
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v
