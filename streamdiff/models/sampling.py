"""Sigma schedules, the step from a prediction to the next latents, and counter-based noise. Pure functions.

Convention (Self-Forcing): x_t = (1 - sigma) x0 + sigma noise, the model predicts the flow v = noise - x0 and is told
timestep = 1000 sigma. Between steps x0 is re-noised with fresh noise, there is no ODE step.
"""

from __future__ import annotations

import torch
from torch import Tensor

TIMESTEPS = 1000.0


def shifted(sigma: float, shift: float) -> float:
    """Wan's timestep shift: s * sigma / (1 + (s - 1) * sigma)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def schedule(steps: int, shift: float = 5.0) -> tuple[float, ...]:
    """Sigmas of `steps` denoise steps, falling from 1: equal spacing, then the shift (4 steps: 1, .9375, .8333, .625).

    Fewer than four steps are the first ones of every second, so that 2 steps are levels that 4 steps have too:
    1 and .8333.
    """
    if steps not in (1, 2, 4):
        raise ValueError(f"steps is {steps}; the schedule has 1, 2 or 4")
    return tuple(shifted(1 - i * (4 // steps) / 4, shift) for i in range(steps))


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """x_t at `sigma`, a number or a tensor that broadcasts."""
    return (1 - sigma) * x0 + sigma * noise


def clean_from_flow(x_t: Tensor, flow: Tensor, sigma: Tensor | float) -> Tensor:
    """x0 = x_t - sigma * v."""
    return x_t - sigma * flow


_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finaliser: neighbouring counters become unrelated seeds."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def counter_seed(*counters: int) -> int:
    """A 32-bit seed from any integers (the CPU generator looks at 32 bits only)."""
    key = 0
    for counter in counters:
        key = _mix(key ^ (counter & _MASK))
    return key >> 32


def noise(shape: tuple[int, ...], *, seed: int, chunk: int, step: int) -> Tensor:
    """Standard normal noise, float32 on the CPU, a pure function of (seed, chunk, step).

    Drawn on the CPU so that every device, number of stages and batch size sees the same values.
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(counter_seed(seed, chunk, step)))
