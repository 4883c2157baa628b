"""Training windows: latents of consecutive chunks of a stream, and what each chunk shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from streamdiff.models.tiny.scene import CAMERAS, HOURS, SIZES
from training.scene_rows import COLUMN
from training.world.shapes import RADIUS
from training.world.tracks import CONTROLS, SIZE

CHUNK = 3
"""Latent frames of a chunk."""
CHUNKS = 5
"""Chunks of a whole window."""
NEAR = (6.0, 12.0)
"""Loss weights around a thing, for each of `scene.SIZES`: what is small covers less than half as many pixels."""
AROUND = 1.5
"""How far around a thing that is, in its radii."""
PLAIN_CHANGE, MOST_MOVING = 0.3, 6.0
"""Mean squared change of latents per chunk that is usual under a camera that pans (over the sky a quarter of it, where
time passes a twentieth), and the most that scenery which changes less may weigh."""


@dataclass(frozen=True)
class Windows:
    """A batch of training windows of n chunks, CHUNKS unless cut.

    latents `[B, n, C, CHUNK, h, w]`, normalised; scenes int64 `[B, n, fields]`; start bool `[B]`, on the CPU: the
    window's first chunk is its stream's first; place float `[B, n, CHUNK, 2, 2]`: centres (y, x) of both things in
    pixels, halfway through each latent frame; bare like latents, but without things (in windows that are not to be
    corrupted, with them); ids int64 `[B, n, tokens]`: those of the scenes' sentences; video `[B, C, CHUNK, h, w]` or
    None: what the noisy copies of the last chunk show instead of it; controls `[B, n, CHUNK, K]`: what steered each
    latent frame.
    """

    latents: Tensor
    scenes: Tensor
    start: Tensor
    place: Tensor
    bare: Tensor
    ids: Tensor
    controls: Tensor
    video: Tensor | None = None

    by_chunk: ClassVar[tuple[str, ...]] = ("latents", "scenes", "place", "bare", "ids", "controls")
    """Fields that have a value for every chunk."""

    def cut(self, first: Tensor, chunks: int) -> Self:
        """`chunks` chunks of every window from chunk `first` `[B]`, on the CPU, on."""
        device = self.latents.device
        window = torch.arange(len(first), device=device)[:, None]
        chunk = (first[:, None] + torch.arange(chunks)).to(device, non_blocking=True)
        parts = {name: getattr(self, name)[window, chunk] for name in self.by_chunk}
        return replace(self, start=self.start & (first == 0), **parts)

    def rows(self, rows: Tensor) -> Self:
        """The windows `rows` `[n]`, on the CPU, of windows without a video."""
        here = rows.to(self.latents.device)
        return replace(self, start=self.start[rows], **{name: getattr(self, name)[here] for name in self.by_chunk})

    def singles(self) -> Self:
        """The windows with each latent frame as a chunk of its own."""

        def apart(part: Tensor) -> Tensor:
            return part.transpose(2, 3).flatten(1, 2).unsqueeze(3)

        def repeated(part: Tensor) -> Tensor:
            return part.repeat_interleave(self.latents.shape[3], 1)

        return replace(
            self,
            latents=apart(self.latents),
            bare=apart(self.bare),
            scenes=repeated(self.scenes),
            ids=repeated(self.ids),
            place=self.place.flatten(1, 2).unsqueeze(2),
            controls=self.controls.flatten(1, 2).unsqueeze(2),
        )

    def drawn(self, low: float, high: float, generator: torch.Generator) -> Tensor:
        """A number from `low` to `high` for every window, `[B, 1, 1, 1, 1]`."""
        numbers = low + (high - low) * torch.rand(len(self.latents), generator=generator)
        return numbers.to(self.latents.device, non_blocking=True).view(-1, 1, 1, 1, 1)

    def from_centers(self) -> tuple[Tensor, Tensor]:
        """How far each row `[..., h]` and column `[..., w]` is from the centres `place` `[..., 2]`, in pixels."""
        side, half = SIZE, SIZE / 2
        height, width = self.latents.shape[-2:]
        y = (torch.arange(height, device=self.place.device) + 0.5) * (side / height)
        x = (torch.arange(width, device=self.place.device) + 0.5) * (side / width)
        dy = (y - self.place[..., 0, None] + half).remainder(side) - half
        dx = (x - self.place[..., 1, None] + half).remainder(side) - half
        return dy, dx

    def reach(self) -> Tensor:
        """How far each latent pixel is from each thing's centre, in radii of that thing, `[B, n, CHUNK, 2, h, w]`; far
        away where there is no thing."""
        dy, dx = self.from_centers()
        radius = torch.tensor([RADIUS[name] for name in SIZES]).to(self.place.device, non_blocking=True)
        sizes = self._sizes()
        there = torch.stack([torch.ones_like(sizes[..., 0]), self.scenes[..., COLUMN["second"]]], -1)
        away = (dy[..., :, None].square() + dx[..., None, :].square()).sqrt()
        scaled: Tensor = away / radius[sizes][:, :, None, :, None, None]
        return torch.where(there[:, :, None, :, None, None] > 0, scaled, 99.0)

    def weight(self) -> Tensor:
        """Loss weights `[B, n, 1, CHUNK, h, w]`: more around things, and where scenery moves; twice as much at night,
        when there is half as much to be seen."""
        hour = self.scenes[..., COLUMN["hour"]]
        dark = torch.where(hour == HOURS.index("night"), 2.0, 1.0).view(*hour.shape, 1, 1, 1, 1)
        reach = self.reach()
        heavy = torch.tensor(NEAR).to(reach.device, non_blocking=True)[self._sizes()][:, :, None, :, None, None]
        near = torch.where(reach < AROUND, heavy, 0.0).amax(3)
        scenery = self._scenery_weight(reach.amin(3) > AROUND)[:, :, None, None, None]
        return dark * torch.maximum(near, scenery).unsqueeze(2)

    def _sizes(self) -> Tensor:
        """Rows of both things' sizes in `scene.SIZES`, int64 `[B, n, 2]`."""
        return torch.stack([self.scenes[..., COLUMN[name]] for name in ("size", "second_size")], -1)

    def _scenery_weight(self, free: Tensor) -> Tensor:
        """Loss weights `[B, n]` of scenery, which is where `free` bool `[B, n, CHUNK, h, w]` says: 1 where it stands
        still; where the camera pans or time passes, more the less of it changes from chunk to chunk, since the loss
        would hardly notice whether it does."""
        if self.latents.shape[1] == 1:
            return torch.ones_like(self.scenes[..., 0], dtype=torch.float32)
        both = (free[:, 1:] & free[:, :-1]).unsqueeze(2).expand_as(self.bare[:, 1:])
        squared = torch.where(both, (self.bare[:, 1:] - self.bare[:, :-1]).square(), 0.0)
        change = squared.sum((2, 3, 4, 5)) / both.sum((2, 3, 4, 5)).clamp(min=1)
        change = torch.cat([change[:, :1], change], 1)  # the first chunk's is that of the next
        plain = PLAIN_CHANGE * (free.shape[2] / CHUNK) ** 2
        weight = (plain / change.clamp(min=1e-6)).sqrt().clamp(1.0, MOST_MOVING)
        pans = self.scenes[..., COLUMN["camera"]] != CAMERAS.index("still")
        pans |= (self.controls[..., CONTROLS.index("pan_x")] != 0).any(-1)
        passes = self.scenes[..., COLUMN["hour"]] == HOURS.index("passing")
        return torch.where(pans | passes, weight, 1.0)

    def corrupted(self, generator: torch.Generator) -> Tensor:
        """Latents with things faded, shrunk, or full of holes, in all chunks of the windows to be corrupted."""
        batch, device = len(self.latents), self.latents.device

        reach = self.reach().amin(3)
        kind = torch.randint(3, (batch,), generator=generator).to(device, non_blocking=True).view(-1, 1, 1, 1, 1)
        rows = torch.arange(reach.shape[-1], device=device) % 2
        patchy = (rows[:, None] ^ rows).float().expand_as(reach)
        fade, radius = (self.drawn(low, 0.9, generator) for low in (0.2, 0.3))
        missing = torch.where(kind == 0, fade, torch.where(kind == 1, (reach > radius).float(), patchy))
        return torch.lerp(self.latents, self.bare, missing.unsqueeze(2).expand_as(self.latents))
