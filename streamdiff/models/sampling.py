"""Sigma schedules, the step from a prediction to the next latents, and counter-based noise. Pure functions.

Convention (Self-Forcing): x_t = (1 - sigma) x0 + sigma noise, the model predicts the flow v = noise - x0 and is given
timestep = 1000 sigma. Between steps x0 is re-noised with fresh noise, there is no ODE step.

Schedules need no torch, and this module imports it only to draw noise: commands that only list or plan can read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from streamdiff.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

TIMESTEPS = 1000.0
_GRID = 1000  # points of the grid on which the trainers' schedulers look noise levels up
_TRUNCATED_FROM = 0.999  # where the grid of schedules with truncated timesteps begins, before the shift


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


# ---- schedules as they are published -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Denoise steps: `timesteps` is what the model is given, `sigmas` the noise levels that x0 and x_t are made with.

    Both have one entry per step and fall strictly; timesteps lie in (0, 1000] (the last of several may be 0), sigmas in
    (0, 1]. After the last step the latents are x0; nothing is added any more. `first` is that of a stream's first
    chunk, where it has one of its own, with at least as many steps. `noise_scale`, in (0, 1], is the factor on the
    noise that a chunk begins with; not on noise that is mixed with input, nor on what somebody gives as what the first
    step receives. `grid_shift` says that the noise level of any timestep is that of the nearest grid point at this
    shift, see `nearest` of `published`; None: it is timestep / 1000. `renoise`, one less than steps, are the levels
    that x_t of the second step and of later ones is made with, where they are not their `sigmas`.

    Raises:
        ConfigError: no step, other lengths, a value out of range or not below the one before it, or a first chunk with
            fewer steps.
    """

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    first: Schedule | None = None
    noise_scale: float = 1.0
    grid_shift: float | None = None
    renoise: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check("steps", self.timesteps, TIMESTEPS, zero_end=True)
        _check("sigmas", self.sigmas, 1.0)
        if len(self.timesteps) != len(self.sigmas):
            raise ConfigError(
                f"steps are {len(self.timesteps)} and sigmas {len(self.sigmas)}; every step needs one sigma"
            )
        if self.first is not None and self.first.steps < self.steps:
            raise ConfigError(
                f"the first chunk has {self.first.steps} steps and the others {self.steps}; it needs at least as many"
            )
        if self.renoise is not None:
            _check("renoise_sigmas", self.renoise, 1.0)
            if len(self.renoise) != self.steps - 1:
                raise ConfigError(
                    f"renoise_sigmas are {len(self.renoise)} and steps {self.steps}; every step but the first needs one"
                )
        if not 0 < self.noise_scale <= 1:
            raise ConfigError(f"noise_scale is {self.noise_scale:g}, but must be above 0 and at most 1")

    @property
    def steps(self) -> int:
        """Denoise steps per chunk, the first one's left aside."""
        return len(self.timesteps)

    def renoise_sigma(self, step: int) -> float:
        """The noise level that x_t of `step`, from 1, is made with."""
        return self.sigmas[step] if self.renoise is None else self.renoise[step - 1]

    def of(self, chunk: int) -> Schedule:
        """The schedule of chunk `chunk` of a stream, from 0."""
        return self.first if chunk == 0 and self.first is not None else self


def blended(before: Tensor, after: Tensor, share: float, along: str) -> Tensor:
    """Embeddings `[T, D]` of which `share`, 0 to 1, are `after`: along a `line`, or row by row along the `sphere`, as
    a row's direction turns at an even rate and its length changes evenly."""
    if along == "line":
        return before.lerp(after, share)
    import torch

    lengths = before.norm(dim=-1, keepdim=True), after.norm(dim=-1, keepdim=True)
    one, other = before / lengths[0], after / lengths[1]
    angle = (one * other).sum(-1, keepdim=True).clamp(-1, 1).acos()
    turned = (((1 - share) * angle).sin() * one + (share * angle).sin() * other) / angle.sin()
    straight = before.lerp(after, share)  # of rows that are zero, or point the same or the opposite way
    return torch.where(angle.sin() > 1e-3, turned * lengths[0].lerp(lengths[1], share), straight)


def nearest_steps(old: Schedule, new: Schedule) -> tuple[int, ...]:
    """For each step of `new` the step of `old` whose timestep is nearest to its own; of two the noisier."""
    return tuple(
        min(range(old.steps), key=lambda step: abs(old.timesteps[step] - timestep)) for timestep in new.timesteps
    )


def from_timesteps(timesteps: Sequence[float], sigmas: Sequence[float] | None = None) -> Schedule:
    """The schedule of given timesteps, as the model takes them; sigmas are timestep / 1000 unless they are given.

    A 0 at the end of either list is dropped, see `without_end`; but a timestep of 0 that has a sigma above 0 is a step.

    Raises:
        ConfigError: see `Schedule`.
    """
    if sigmas is None:
        return published(timesteps)
    levels = without_end(sigmas)
    kept = len(levels) == len(timesteps)
    return Schedule(tuple(map(float, timesteps)) if kept else without_end(timesteps), levels)


def embedded_schedule(steps: int, shift: float) -> Schedule:
    """The schedule of `steps` of the embedded model's steps, see `schedule`."""
    sigmas = schedule(steps, shift)
    return Schedule(tuple(TIMESTEPS * sigma for sigma in sigmas), sigmas)


def published(
    steps: Sequence[float],
    *,
    shift: float = 1.0,
    warp: bool = False,
    nearest: bool = False,
    keep_end: bool = False,
    timestep_dtype: str = "exact",
    first_noise_scale: float = 1.0,
    truncated: bool = False,
) -> Schedule:
    """The schedule from a list as a model's authors give it.

    Args:
        steps: timesteps, falling, in (0, 1000]; a 0 at the end is dropped, see `without_end`.
        shift: Wan's timestep shift; 1 shifts nothing.
        warp: the list is meant before the shift: the model is given 1000 * shifted(step / 1000). Otherwise it is given
            the list as it stands.
        nearest: the authors' code does not take timestep / 1000 as the noise level, it looks up the nearest of 1,000
            shifted grid points, as Self-Forcing's scheduler and all that grew from it do. Told 700 at shift 8, they
            mix with 0.70023. What was warped from whole numbers lies on the grid already.
        keep_end: the 0 at the end is a step of its own. It needs `nearest`, which gives it a noise level above 0: that
            of the lowest grid point (0.005 at shift 5).
        timestep_dtype: `bfloat16` where the authors' code tells timesteps in that type, which rounds them; noise levels
            stay as they are.
        first_noise_scale: `noise_scale` of `Schedule`.
        truncated: the list is of timesteps that were cut to whole numbers, so that several noise levels of the authors'
            grid have the same: x0 is made with the first of these, x_t with the second, as LingBot-World's code does.

    Raises:
        ConfigError: see `Schedule`; a shift that is not above 0; an end to keep that is no 0, or not `nearest`; a
            truncated timestep that is not on the grid.
    """
    if not 0 < shift < math.inf:
        raise ConfigError(f"shift is {shift:g}, but must be a number above 0")
    raw = tuple(map(float, steps)) if keep_end else without_end(steps)
    _check("steps", raw, TIMESTEPS, zero_end=keep_end)
    if keep_end and (raw[-1] != 0 or not nearest):
        raise ConfigError(f"keep_end is for a list that ends with 0, with nearest; this one ends with {raw[-1]:g}")
    if truncated:
        levels = [_truncated_levels(step, shift) for step in raw]
        later = tuple(each[-1] for each in levels[1:])
        return Schedule(raw, tuple(each[0] for each in levels), noise_scale=first_noise_scale, renoise=later or None)
    timesteps = tuple(TIMESTEPS * shifted(step / TIMESTEPS, shift) for step in raw) if warp else raw
    if nearest:
        sigmas = tuple(nearest_sigma(step, shift) for step in timesteps)
    else:
        sigmas = tuple(shifted(step / TIMESTEPS, shift) if warp else step / TIMESTEPS for step in raw)
    heard = tuple(map(rounded_to_bfloat16, timesteps)) if timestep_dtype == "bfloat16" else timesteps
    return Schedule(heard, sigmas, noise_scale=first_noise_scale, grid_shift=shift if nearest else None)


def rounded_to_bfloat16(value: float) -> float:
    """The bfloat16 nearest to a `value` above 0, which has 8 binary digits; of two equally near, the even one."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, 8)), exponent - 8)


def without_end(steps: Sequence[float]) -> tuple[float, ...]:
    """The list without a 0 at its end.

    Some lists are published as 1000, ..., 0. The 0 says where the way ends, at the clean latents; it is no step of its
    own, since there is no noise left to take away. Self-Forcing's authors ask to remove it, StreamDiffusionV2 drops it
    for video to video. Krea's authors do run their model on it: `keep_end` of `published`.
    """
    steps = tuple(float(step) for step in steps)
    return steps[:-1] if len(steps) > 1 and steps[-1] == 0 else steps


def nearest_sigma(timestep: float, shift: float) -> float:
    """The grid point nearest to `timestep`: shifted(i / 1000) for i = 1 to 1,000; of two equally near, the larger.

    In the authors' code the grid is float32, so theirs is off by up to 6e-8.
    """
    wanted = timestep / TIMESTEPS
    return min(grid(shift), key=lambda sigma: abs(sigma - wanted))


def _truncated_levels(timestep: float, shift: float) -> list[float]:
    """The first two noise levels, or the only one, that have this whole timestep."""
    points = (shifted(_TRUNCATED_FROM * (1 - i / _GRID), shift) for i in range(_GRID))
    found = [sigma for sigma in points if int(TIMESTEPS * sigma) == timestep]
    if not found:
        raise ConfigError(f"steps has {timestep:g}, which is the timestep of no noise level at shift {shift:g}")
    return found[:2]


def grid(shift: float) -> tuple[float, ...]:
    """Noise levels on the grid of the authors' schedulers, descending: shifted(i / 1000) for i = 1,000 to 1."""
    return tuple(shifted(i / _GRID, shift) for i in range(_GRID, 0, -1))


def _check(name: str, values: tuple[float, ...], high: float, zero_end: bool = False) -> None:
    """Raises ConfigError unless `values` fall strictly within (0, high]; with `zero_end` the last may be 0."""
    shown = ", ".join(f"{value:g}" for value in values) or "empty"
    some = without_end(values) if zero_end else values
    if not some or not all(0 < value <= high for value in some):
        raise ConfigError(f"{name} is {shown}, but must be numbers above 0 and at most {high:g}, at least one")
    if any(later >= earlier for earlier, later in pairwise(values)):
        raise ConfigError(f"{name} is {shown}, but every entry must be below the one before it")


# ---- one step ----------------------------------------------------------------------------------------------------


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """x_t at `sigma`, a number or a tensor that broadcasts."""
    return (1 - sigma) * x0 + sigma * noise


def clean_from_flow(x_t: Tensor, flow: Tensor, sigma: Tensor | float) -> Tensor:
    """x0 = x_t - sigma * v, in the dtype of `x_t`.

    The head's latents are float32 whatever the model's dtype; that is why Self-Forcing's way through float64, which
    matters where latents are bfloat16, is not needed.
    """
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
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(counter_seed(seed, chunk, step)))


def condition(latents: Tensor, masks: int, mask: Tensor | None = None) -> Tensor:
    """What a picture is to an image-to-video model `[masks + C, n, h, w]`: `mask` `[masks, F, h, w]` (None: 1 on the
    first latent frame alone), then `latents` `[C, F, h, w]`; the shorter is continued with its last latent frame."""
    import torch

    if mask is None:
        mask = latents.new_zeros(masks, 2, *latents.shape[2:])
        mask[:, 0] = 1
    most = max(mask.shape[1], latents.shape[1])
    return torch.cat([each[:, [min(i, each.shape[1] - 1) for i in range(most)]] for each in (mask, latents)])
