"""Weights of the blocks' linear layers in 8 bits, by torchao: half the memory of bfloat16, a quarter of float32.

`int8` rounds the weights, a scale per row, and computes as before; it saves memory, not time. `fp8` rounds weights and,
as they come, activations, a scale per row of each, and multiplies in 8 bits; whether that is faster differs between
GPUs and sizes, and `try_fp8` finds out. What stays as it is: patch, time and text embedding, modulation, norms, biases
and the output layer, which are small and which a picture is sensitive to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamdiff.device import seconds_per_call
from streamdiff.errors import ConfigError
from streamdiff.heavy_import import optional

MODES = ("none", "fp8", "int8")
MARGIN = 0.03
"""Share of the time that fp8 has to save, or it is not taken."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which on NVIDIA GPUs multiply in fp8: Ada, Hopper, Blackwell."""
INSTALL = "install it with: pip install 'streamdiff[quantize]'"
_LINEAR = (".attn1.", ".attn2.", ".ffn.", ".cam_")


def check(mode: str, device: torch.device, dtype: torch.dtype) -> None:
    """That weights in `dtype` can be quantised this way for this device.

    Raises:
        ConfigError: no torchao, or a device or dtype that cannot; says why, and what can be used.
    """
    if (reason := unsuited(mode, device, dtype)) is not None:
        raise ConfigError(f"--quantize is {mode}, which {reason}")
    optional("torchao.quantization", "quantize", f"--quantize {mode}")


def unsuited(mode: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why weights in `dtype` cannot be quantised this way for this device, and what can be done; None if they can."""
    if mode != "fp8":
        return None
    if (found := _no_fp8(device)) is not None:
        least = ".".join(map(str, FP8_CAPABILITY))
        return (
            f"takes an NVIDIA GPU of compute capability {least} or more (Ada, Hopper, Blackwell), and {found}; use "
            "int8 or none"
        )
    if dtype is not torch.bfloat16:
        word = str(dtype).removeprefix("torch.")
        return f"is made from bfloat16, and the model runs in {word}; use --dtype bfloat16, or int8"
    return None


def is_quantized(name: str, shape: tuple[int, ...] | torch.Size) -> bool:
    """Whether the tensor `name` (diffusers' names) is the weight of a block's linear layer."""
    return name.endswith(".weight") and len(shape) == 2 and any(p in name for p in _LINEAR)


def quantize(weight: Tensor, mode: str, name: str) -> Tensor:
    """`weight` `[out, in]` in 8 bits, on the same device; it still says the dtype that it computes in. `name` is for
    the message.

    Raises:
        ConfigError: torchao leaves it as it is, as it does with sizes that its kernels do not take.
    """
    ao = optional("torchao.quantization", "quantize", f"--quantize {mode}")
    made = {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "fp8": lambda: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
    }[mode]()
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    ao.quantize_(layer, made)
    if type(layer.weight.data) is Tensor:
        raise ConfigError(f"{name} {list(weight.shape)} cannot be quantised to {mode}; use another --quantize, or none")
    return layer.weight


Product = Callable[[Tensor, Tensor], Tensor]
"""Activations `[L, in]` and a weight `[out, in]` to `[L, out]`."""


def try_fp8(
    matrices: Mapping[tuple[int, int], int],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    compiled: Callable[[Product], Product] | None = None,
    stopwatch: Callable[[Callable[[], object]], float] = seconds_per_call,
) -> tuple[str, str]:
    """`fp8` if the products of a block are faster in it than in `dtype` by `MARGIN`, else `none`; and why, for people.

    Args:
        matrices: how often a block has a weight of this shape (out, in).
        compiled: compiles a product, where the model will be: fused, rounding the activations costs less.
    """
    if (reason := unsuited("fp8", device, dtype)) is not None:
        return "none", f"fp8 {reason}"

    @torch.inference_mode()
    def time_products(fp8: bool) -> float:
        """Seconds of a block's products."""
        found = 0.0
        for (out, width), count in matrices.items():

            def product(given: Tensor, weight: Tensor) -> Tensor:
                return F.linear(given, weight)

            weight = torch.randn(out, width, device=device).to(dtype)
            given = torch.randn(tokens, width, device=device).to(dtype)
            weight = quantize(weight, "fp8", "a weight") if fp8 else weight
            run = product if compiled is None else compiled(product)
            found += count * stopwatch(partial(run, given, weight))
        return found

    try:
        own_s, fp8_s = time_products(fp8=False), time_products(fp8=True)
    except (ConfigError, RuntimeError, AssertionError, ValueError) as error:
        return "none", f"fp8 cannot be had here: {(str(error) or type(error).__name__).splitlines()[0]}"
    reason = f"tried at a block's sizes and {tokens:,} tokens: fp8 {1000 * fp8_s:.3g} ms, without {1000 * own_s:.3g} ms"
    return "fp8" if fp8_s < (1 - MARGIN) * own_s else "none", reason


def _no_fp8(device: torch.device) -> str | None:
    """Why the device cannot multiply in fp8; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
    return None
