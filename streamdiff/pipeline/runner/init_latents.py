"""Video to video: encoded input in the place of pure noise, and how much noise is mixed into it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from streamdiff.models.sampling import TIMESTEPS, add_noise

FULL_MOTION = 0.2
"""Root mean square difference of neighbouring frames that counts as full motion; published for pixels in [-1, 1]."""
REACH = 0.1
"""How far full motion lowers the noise level."""
TIMESTEP_OFFSET = 0.1
"""How much less noise the model is told of than was mixed in, by the same authors, on purpose."""
_SMOOTHING = 0.9
"""Share of a chunk's own level in what is used; the rest is the level of the chunk before."""


@dataclass(frozen=True)
class InitLatents:
    """Encoded input that a stream's chunks start from. Chunks beyond n begin as the last one.

    latents: clean and normalised as the model has them, `[n, C, F, h, w]`.
    noise_level: 0 to 1, float32 `[n]`: noise mixed into each chunk for its first step.
    timestep: 0 to 1000, float32 `[n]`: what the model is given at that step. x0 is made from timestep / 1000
    (StreamDiffusionV2's code rounds that to its grid, by up to 0.001).
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
        cls, latents: Tensor, strength: float, frames: Tensor | None = None, together: int = 1
    ) -> InitLatents:
        """The more motion, the less noise, see `motion_levels`; `timestep` is `TIMESTEP_OFFSET` lower. Motion is that
        of `frames` `[n, C, F, H, W]`, such as pixels, or of the latents themselves."""
        levels = motion_levels(latents if frames is None else frames, strength, together)
        timestep = (levels * TIMESTEPS).floor() - TIMESTEP_OFFSET * TIMESTEPS
        return cls(latents, levels.float(), timestep.float())

    def on(self, device: torch.device) -> InitLatents:
        """The same with its levels on `device`; latents stay where they are, and go there chunk by chunk."""
        return replace(self, noise_level=self.noise_level.to(device), timestep=self.timestep.to(device))

    def begin(self, chunk: int, noise: Tensor) -> Tensor:
        """What the first step of `chunk` receives, `[C, F, h, w]` like `noise`."""
        at = self._at(chunk)
        return add_noise(self.latents[at].to(noise), noise, self.noise_level[at])

    def level(self, chunk: int) -> Tensor:
        """The timestep that the model is told at the first step, without dimensions."""
        return self.timestep[self._at(chunk)]

    def _at(self, chunk: int) -> int:
        return min(chunk, len(self.latents) - 1)


def motion_levels(frames: Tensor, strength: float, together: int = 1) -> Tensor:
    """StreamDiffusionV2's noise controller (github.com/chenfengxu714/StreamDiffusionV2, `inference.py`): with m the
    largest root mean square difference of a chunk's neighbouring frames, the one before the chunk included, over
    `FULL_MOTION` and at most 1, the level is 0.9 (strength - 0.1 m) + 0.1 (the level before). Theirs looks at pixels.
    The first chunk, or those that are made `together`, have `strength` itself. Nothing is read back to the host.

    Args:
        frames: `[n, C, F, h, w]`.
        strength: level without motion, 0 to 1.

    Returns:
        float64 `[n]` on the device of `frames`, from `strength - 0.1` to `strength`.
    """
    count, length = len(frames), frames.shape[2]
    line = frames.double().movedim(2, 1).flatten(0, 1)
    steps = (line[1:] - line[:-1]).square().flatten(1).mean(1).sqrt()
    motion = torch.cat([steps.new_zeros(1), steps]).view(count, length).amax(1) / FULL_MOTION
    levels = [motion.new_full((), strength)] * min(together, count)
    for share in motion.clamp(0, 1)[together:]:
        levels.append(_SMOOTHING * (strength - REACH * share) + (1 - _SMOOTHING) * levels[-1])
    return torch.stack(levels)
