"""Which attention kernel runs, by name, and whether it can be trusted here.

Names are torch's own kernels, and others that diffusers' dispatch knows (flash-attn, FlashAttention 3 and 4,
SageAttention, xformers, kernels of the hub), where they are installed. A kernel that is fast and wrong gives a picture
of noise and no error (a published one does so on Hopper GPUs), so the chosen one computes a small case at the start and
is compared with the plain formula.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import Tensor

from streamdiff.errors import ConfigError

KERNELS = ("math", "flash", "efficient", "cudnn")
"""torch's, by their names in `model.attention`; `auto` leaves the choice to torch."""


@dataclass(frozen=True)
class Dispatched:
    """A kernel behind diffusers' dispatch, for CUDA: its name there, its module, and how to install that."""

    backend: str
    module: str
    install: str

    @property
    def hub(self) -> bool:
        """Whether the kernel itself is fetched from the hub when it is first used."""
        return self.module == "kernels"


_HUB, _SAGE = ("kernels", "pip install kernels"), ("sageattention", "pip install sageattention, 2.1.1 or newer")
DISPATCHED = {
    "flash_2": Dispatched("flash", "flash_attn", "pip install flash-attn"),
    "flash_3": Dispatched("_flash_3", "flash_attn_interface", "built from the hopper folder of flash-attention"),
    "flash_2_hub": Dispatched("flash_hub", *_HUB),
    "flash_3_hub": Dispatched("_flash_3_hub", *_HUB),
    "flash_4_hub": Dispatched("flash_4_hub", *_HUB),
    "sage": Dispatched("sage", *_SAGE),
    "sage_fp16": Dispatched("_sage_qk_int8_pv_fp16_cuda", *_SAGE),
    "sage_hub": Dispatched("sage_hub", *_HUB),
    "xformers": Dispatched("xformers", "xformers", "pip install xformers"),
}
"""diffusers', by their names in `model.attention`. What is `flash` there is `flash_2` here, as torch has a `flash`."""
NAMES = ("auto", *KERNELS, *DISPATCHED)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_QUANTIZED = {"sage": 8e-2, "sage_fp16": 8e-2, "sage_hub": 8e-2}
"""Kernels that round to 8 bits inside are that much off by design."""
_QUERIES, _KEYS = 64, 192
_REFUSALS = (RuntimeError, ValueError, AssertionError, NotImplementedError, ImportError, AttributeError, OSError)
"""What kernels, diffusers and the hub's client raise where one cannot be had."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of `[R, L, H, d]` over `[R, K, H, d]` by the kernel that torch chooses."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@cache
def kernel(name: str) -> Attend:
    """As `attend`, by the kernel of this name, one of `NAMES`. The choice is made in each call: torch's `sdpa_kernel`
    would set flags of the whole process, which other threads meet."""
    if name == "auto":
        return attend
    return _own_kernel(name) if name in KERNELS else _dispatching(DISPATCHED[name].backend)


def _own_kernel(name: str) -> Attend:
    """One of torch's `KERNELS`, called by itself: raises RuntimeError or NotImplementedError where it cannot run."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        aten: Any = torch.ops.aten
        if name == "math":
            result = aten._scaled_dot_product_attention_math(q, k, v)
        elif name == "flash" and query.device.type == "cpu":
            result = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        elif name == "flash":
            result = aten._scaled_dot_product_flash_attention(q, k, v)
        elif name == "efficient":
            result = aten._scaled_dot_product_efficient_attention(q, k, v, None, False)
        else:
            result = aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)
        mixed: Tensor = result[0]
        return mixed.transpose(1, 2)

    return run


def _dispatching(name: str) -> Attend:
    backend = AttentionBackendName(name)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = dispatch_attention_fn(query, key, value, backend=backend)
        return result

    return run


def probe(name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Compute a small case with the kernel and compare it with the formula in float64. A kernel of the hub is fetched.

    Raises:
        ConfigError: an unknown kernel, one that is not installed or cannot run here, or one whose numbers are wrong;
            says why or by how much, and which ones are right here.
    """
    if name not in NAMES:
        raise ConfigError(f"model.attention is {name!r}; it can be {', '.join(NAMES)}")
    if (fault := _fault(name, device, dtype, heads, head_dim)) is None:
        return
    others = [other for other, bad in survey(device, dtype, heads, head_dim).items() if bad is None and other != name]
    case = f"{device}, {str(dtype).removeprefix('torch.')}, head width {head_dim}"
    raise ConfigError(f"attention kernel {name} {fault} ({case}); right here are: {', '.join(others) or 'none'}")


def survey(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> dict[str, str | None]:
    """Every kernel: None where it runs here and its numbers are right, else why not. Kernels of the hub are not
    fetched for that."""
    return {
        name: "would be fetched from the hub, and tried, when it is asked for"
        if name in DISPATCHED and DISPATCHED[name].hub and missing(name, device) is None
        else _fault(name, device, dtype, heads, head_dim)
        for name in NAMES
    }


def _fault(name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> str | None:
    """What is wrong with a kernel here; None if nothing is."""
    if (reason := missing(name, device)) is not None:
        return reason
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, tokens, heads, head_dim, generator=generator).to(device, dtype)
        for tokens in (_QUERIES, _KEYS, _KEYS)
    )
    try:
        with torch.inference_mode():
            if name in DISPATCHED:
                with attention_backend(DISPATCHED[name].backend):  # its requirements; fetches
                    pass
            got = kernel(name)(query, key, value)
    except _REFUSALS as error:
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "cannot run here: " + (told.partition(". ")[0] if isinstance(error, NotImplementedError) else told)
    expected = _formula(query, key, value)
    off = float((got.double().cpu() - expected).norm() / expected.norm())
    allowed = max(_TOLERANCE[dtype], _QUANTIZED.get(name, 0.0))
    return None if off <= allowed else f"is wrong here: off by {off:.3g}, with {allowed:g} allowed"


def missing(name: str, device: torch.device) -> str | None:
    """Why the kernel cannot be had on such a device, whatever the numbers: what is not installed, or another device
    that it is for. None where it may run; whether it does, and rightly, `probe` says."""
    kernel = DISPATCHED.get(name)
    if kernel is None:
        return None
    if kernel.backend not in AttentionBackendName._value2member_map_:
        return f"is not known to diffusers {importlib.metadata.version('diffusers')}, which has it in newer versions"
    if importlib.util.find_spec(kernel.module) is None:
        return f"is not installed (no module {kernel.module}; {kernel.install})"
    if device.type != "cuda":
        return f"is for CUDA, and the device is {device.type}"
    return None


def _formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula, in float64 on the CPU."""
    q, k, v = (x.double().cpu().transpose(1, 2) for x in (query, key, value))
    return (torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v).transpose(1, 2)
