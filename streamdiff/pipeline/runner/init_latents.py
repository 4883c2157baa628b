"""Video to video: initial latents from an encoded video, or from one that comes while the stream runs, and how much
noise is mixed into them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.sampling import TIMESTEPS, Schedule, add_noise, grid
from streamdiff.session_state.fields import session_state

FULL_MOTION = 0.2
"""Root mean square difference of neighbouring frames that counts as full motion; published for pixels in [-1, 1]."""
REACH = 0.1
"""How far full motion lowers the noise level."""
TIMESTEP_OFFSET = 0.1
"""How far the timestep given to the model lies below the noise mixed in, over 1000; on purpose, by the same authors."""
_SMOOTHING = 0.9
"""Share of a chunk's own level in what is used; the rest is the level of the chunk before."""
LOWEST = 0.01
"""Of a level of a session's video, so that there is something to remove."""
MAX_WAITING = 2
"""Encoded chunks of live video that may wait."""
STANDING = 8
"""Chunks that begin one after the other while another waits: what always waits makes the video late for nothing."""


@session_state("chunk-levels")
class ChunkLevels(NamedTuple):
    """Of a chunk that starts from video: noise level and timestep of each of its steps."""

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]


@dataclass(frozen=True)
class InitLatents:
    """Encoded input that a stream's chunks start from. Chunks beyond n begin as the last one.

    latents: clean and normalised as the model has them, `[n, C, F, h, w]`.
    noise_level: 0 to 1, float32 `[n]`: noise mixed into each chunk for its first step; or `[n, F]`, by latent frame.
    timestep: 0 to 1000, float32 `[n]`: what the model is given at that step. x0 is made with the noise level that the
    schedule has for it, see `levels_of`.
    """

    latents: Tensor
    noise_level: Tensor
    timestep: Tensor

    @classmethod
    def steady(cls, latents: Tensor, strength: float, timestep: float) -> InitLatents:
        """The same level for all chunks."""
        level = torch.full((len(latents),), strength)
        return cls(latents, level, torch.full_like(level, timestep))

    @classmethod
    def following_motion(
        cls, latents: Tensor, strength: float, together: int = 1, motion: Tensor | None = None
    ) -> InitLatents:
        """The more the input moves, the less noise, see `motion_levels`; `timestep` is `TIMESTEP_OFFSET` lower."""
        levels = motion_levels(latents, strength, together, motion)
        timestep = (levels * TIMESTEPS).floor() - TIMESTEP_OFFSET * TIMESTEPS
        return cls(latents, levels.float(), timestep.float())

    def on(self, device: torch.device) -> InitLatents:
        """The same with its levels on `device`; latents stay in host memory, pinned for CUDA, and go there chunk by
        chunk."""
        pinned = device.type == "cuda" and self.latents.device.type == "cpu"
        latents = self.latents.pin_memory() if pinned else self.latents  # the host would wait for copies of others
        return InitLatents(latents, self.noise_level.to(device), self.timestep.to(device))

    def begin(self, chunk: int, noise: Tensor) -> Tensor:
        """Input of the first step of `chunk`: latents with `noise` mixed in, both `[C, F, h, w]`."""
        level = self.of_chunk(self.noise_level, chunk)
        latents = self.of_chunk(self.latents, chunk).to(noise.device, noise.dtype, non_blocking=True)
        return add_noise(latents, noise, level[:, None, None] if level.ndim else level)

    def of_chunk(self, values: Tensor, chunk: int) -> Tensor:
        """That of `chunk` among `values` `[n, ...]`."""
        return values[min(chunk, len(self.latents) - 1)]


@dataclass(frozen=True)
class GivenVideo:
    """Encoded video that a session was opened with: chunk k of its stream starts from chunk k of the video, those
    behind its end from noise alone. See `LiveLatents` for what a level below the schedule's does to later steps.

    latents: clean and normalised as the model has them, float32 `[n, C, F, h, w]`, pinned where the model is on CUDA.
    levels: of the noise mixed into each chunk, n of them, above 0 and at most 1.
    """

    latents: Tensor
    levels: tuple[float, ...]

    def on(self, device: torch.device) -> GivenVideo:
        """The same for a model on `device`: pinned for CUDA."""
        return replace(self, latents=self.latents.pin_memory()) if device.type == "cuda" else self

    def take(self, chunk: int, schedule: Schedule) -> tuple[Tensor, ChunkLevels] | None:
        """Latents that a chunk starts from, and its levels; None: it starts from noise alone."""
        if chunk >= len(self.levels):
            return None
        return self.latents[chunk], _lowered(self.levels[chunk], schedule)


@dataclass
class LiveLatents:
    """Encoded video of a session that is fed while it runs: each chunk starts from the oldest that waits.

    The level of a chunk follows how much its video moves, as `motion_levels` has it; `strength` may be changed at any
    time. Where the level lies below that of the schedule's first step, the later ones are lowered in proportion, so
    that no step adds more noise than the input was given. The model is given the levels that are mixed in.
    """

    strength: float
    most: int = MAX_WAITING
    """Chunks that may wait; of more the oldest is dropped."""
    waiting: deque[tuple[Tensor, float]] = field(default_factory=deque)
    """Latents `[C, F, h, w]`, in pinned host memory where the model is on CUDA, and how much their frames move: the
    largest root mean square difference of neighbouring ones, of pixels in [-1, 1]."""
    level: float | None = None
    """That of the latest chunk; None before the first."""
    used: int = 0
    dropped: int = 0
    standing: int = 0
    """Chunks in a row that began while another waited behind theirs."""
    _begun: dict[int, tuple[Tensor, ChunkLevels]] = field(default_factory=dict)

    def add(self, latents: Tensor, motion: float) -> None:
        """What a later chunk starts from. Mutates: self."""
        self.waiting.append((latents, motion))
        if len(self.waiting) > self.most:
            self.waiting.popleft()
            self.dropped += 1

    def take(self, chunk: int, schedule: Schedule) -> tuple[Tensor, ChunkLevels] | None:
        """As `GivenVideo.take`: the oldest latents that wait. Asked again a chunk has the same. Where others waited
        behind them at STANDING chunks in a row, the oldest are dropped first. Mutates: self."""
        if chunk in self._begun:
            return self._begun[chunk]
        if not self.waiting:
            return None
        self.standing = self.standing + 1 if len(self.waiting) > 1 else 0
        if self.standing == STANDING:
            self.waiting.popleft()
            self.dropped += 1
            self.standing = 0
        latents, motion = self.waiting.popleft()
        wanted = self.strength - REACH * min(1.0, motion / FULL_MOTION)
        level = self.strength if self.level is None else _SMOOTHING * wanted + (1 - _SMOOTHING) * self.level
        self.level = level = min(1.0, max(LOWEST, level))
        self._begun[chunk] = latents, _lowered(level, schedule)
        self.used += 1
        return self._begun[chunk]

    def forget(self, chunk: int) -> None:
        """The chunk is finished. Mutates: self."""
        self._begun.pop(chunk, None)

    def begin_video(self) -> None:
        """Another video takes the place of the one before; chunks that have begun keep theirs. Mutates: self."""
        self.waiting.clear()
        self.level, self.used, self.dropped, self.standing = None, 0, 0, 0

    def begin_again(self) -> None:
        """The stream restarts, at chunk 0. Mutates: self."""
        self._begun.clear()
        self.level, self.standing = None, 0


def _lowered(level: float, schedule: Schedule) -> ChunkLevels:
    """Noise levels and timesteps of the steps of a chunk that starts from video with noise of `level` mixed in: where
    it lies below the schedule's first, the later ones are lowered in proportion."""
    share = min(1.0, level / schedule.sigmas[0])
    sigmas = [share * sigma for sigma in schedule.sigmas]
    times = schedule.timesteps if share == 1 else [sigma * TIMESTEPS for sigma in sigmas]
    return ChunkLevels((level, *sigmas[1:]), (level * TIMESTEPS, *times[1:]))


def levels_of(timesteps: Tensor, schedule: Schedule) -> Tensor:
    """The noise levels of any timesteps `[n]` of a schedule, float32: that of its first step, the nearest of its grid,
    or timestep / 1000. Reads nothing back to the host."""
    levels = timesteps.double() / TIMESTEPS
    if schedule.grid_shift is not None:
        points = torch.tensor(grid(schedule.grid_shift), dtype=torch.float64).to(timesteps.device)
        levels = points[(points - levels[:, None]).abs().argmin(1)]
    return torch.where(timesteps == schedule.timesteps[0], schedule.sigmas[0], levels).float()


def motion_levels(frames: Tensor, strength: float, together: int = 1, motion: Tensor | None = None) -> Tensor:
    """StreamDiffusionV2's noise controller (github.com/chenfengxu714/StreamDiffusionV2, `inference.py`): with m the
    largest root mean square difference of a chunk's neighbouring frames, the one before the chunk included, over
    `FULL_MOTION` and at most 1, the level is 0.9 (strength - 0.1 m) + 0.1 (the level before). Theirs looks at pixels.
    The first chunk, or those that are made `together`, have `strength` itself. Nothing is read back to the host.

    Args:
        frames: `[n, C, F, h, w]`.
        strength: level without motion, 0 to 1.
        motion: `[n]`, the largest differences where they are known, of pixels; None: those of `frames`.

    Returns:
        float64 `[n]` on the device of `frames`, from `strength - 0.1` to `strength`.
    """
    count, length = len(frames), frames.shape[2]
    if motion is None:
        line = frames.double().movedim(2, 1).flatten(0, 1)
        steps = (line[1:] - line[:-1]).square().flatten(1).mean(1).sqrt()
        motion = torch.cat([steps.new_zeros(1), steps]).view(count, length).amax(1)
    shares = (motion.double() / FULL_MOTION).clamp(0, 1)
    levels = [shares.new_full((), strength)] * min(together, count)
    for share in shares[together:]:
        levels.append(_SMOOTHING * (strength - REACH * share) + (1 - _SMOOTHING) * levels[-1])
    return torch.stack(levels)
