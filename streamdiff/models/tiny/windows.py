"""Training windows for the transformer: latents of five consecutive chunks of a stream, and what each chunk shows.

A pool of windows is rendered and encoded once, grows while training runs, and is sampled many times: encoding costs as
much as a training step, noise and captions are fresh at every use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models.taehv import TAEHV
from streamdiff.models.tiny import training, world
from streamdiff.models.tiny.train_autoencoder import encode_groups

CHUNK = 3
CHUNKS = 5
CHANGE, REDRAW = 0.5, 0.45
STARTS = 0.25
GROUP = 8


@dataclass(frozen=True)
class Windows:
    """A batch of training windows of n chunks, CHUNKS unless cut.

    latents `[B, n, C, CHUNK, h, w]`, normalised; scenes int64 `[B, n, 4]` (color, shape, motion, background);
    start bool `[B]`: the window's first chunk is its stream's first; place float `[B, n, CHUNK, 2]`: centre
    (y, x) of the shape in pixels, halfway through each latent frame.
    """

    latents: Tensor
    scenes: Tensor
    start: Tensor
    place: Tensor

    def cut(self, first: Tensor, chunks: int) -> Windows:
        """`chunks` chunks of every window from chunk `first` `[B]` on."""
        window = torch.arange(len(first), device=first.device)[:, None]
        chunk = first[:, None] + torch.arange(chunks, device=first.device)
        start = self.start & (first == 0)
        return Windows(self.latents[window, chunk], self.scenes[window, chunk], start, self.place[window, chunk])

    def weight(self, near: float = 6.0, reach_px: float = 36.0) -> Tensor:
        """Loss weights `[B, CHUNKS, 1, CHUNK, h, w]`: `near` around the shape, 1 elsewhere.

        The shape covers a tenth of the picture and is all that moves; unweighted, it is learnt last.
        """
        dy, dx = self.from_shape()
        far = dy[..., :, None].square() + dx[..., None, :].square() > reach_px**2
        return torch.where(far, 1.0, near).unsqueeze(2)

    def from_shape(self) -> tuple[Tensor, Tensor]:
        """How far each row `[B, n, CHUNK, h]` and column `[B, n, CHUNK, w]` is from the shape's centre, in pixels."""
        height, width = self.latents.shape[-2:]
        y = (torch.arange(height, device=self.place.device) + 0.5) * (world.SIZE / height)
        x = (torch.arange(width, device=self.place.device) + 0.5) * (world.SIZE / width)
        half = world.SIZE / 2
        dy = (y - self.place[..., 0:1] + half).remainder(world.SIZE) - half
        dx = (x - self.place[..., 1:2] + half).remainder(world.SIZE) - half
        return dy, dx


def draw_scenes(count: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Scenes `[count, chunks, 4]`: at every other boundary a prompt change that redraws about half of it."""
    sizes = (len(world.COLORS), len(world.SHAPES), len(world.MOTIONS), len(world.BACKGROUNDS))
    fresh = torch.stack([torch.randint(n, (count, chunks), generator=generator) for n in sizes], -1)
    change = torch.rand(count, chunks, 1, generator=generator) < CHANGE
    redraw = change & (torch.rand(count, chunks, 4, generator=generator) < REDRAW)
    for i in range(1, chunks):
        fresh[:, i] = torch.where(redraw[:, i], fresh[:, i], fresh[:, i - 1])
    return fresh


def render_windows(scenes: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
    """Render streams whose shape starts at `origin` `[B, 2]` (y, x).

    Returns:
        frames `[B, chunks * CHUNK * 4, 3, SIZE, SIZE]` and the shape's mean place `[B, chunks * CHUNK, 2]`.
    """
    frames_each = CHUNK * world.FRAMES_PER_LATENT
    per_frame = scenes.repeat_interleave(frames_each, 1)
    step = world.velocities(str(scenes.device))[per_frame[..., 2]]
    place = (origin[:, None] + torch.cumsum(step, 1) - step).remainder(world.SIZE)
    color, shape, background = (per_frame[..., i].flatten() for i in (0, 1, 3))
    video = world.render(color, shape, background, place[..., 0].flatten(), place[..., 1].flatten())
    frames: Tensor = video.unflatten(0, per_frame.shape[:2])
    middle = place[:, :: world.FRAMES_PER_LATENT] + step[:, :: world.FRAMES_PER_LATENT] * 1.5
    return frames, middle.float()


class Starts:
    """The first chunk of every stream there is: it follows from the scene alone. With several processes, a share."""

    @torch.inference_mode()
    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor, device: torch.device) -> None:
        scenes = torch.tensor([scene.indices() for scene in world.all_scenes()], device=device)
        self.scenes = scenes[training.rank() :: training.processes(), None]
        latents, places = [], []
        for group in self.scenes.split(GROUP * CHUNKS):
            frames, place = render_windows(group, torch.full((len(group), 2), world.SIZE // 2, device=device))
            latents.append((encode_groups(autoencoder, frames) - mean.view(1, 1, -1, 1, 1)) / std.view(1, 1, -1, 1, 1))
            places.append(place)
        self.latents, self.place = torch.cat(latents).transpose(1, 2).unsqueeze(1), torch.cat(places).unsqueeze(1)

    def sample(self, count: int, generator: torch.Generator) -> Windows:
        """`count` windows of one chunk."""
        rows = torch.randint(len(self.scenes), (count,), generator=generator).to(self.scenes.device)
        start = torch.ones(count, dtype=torch.bool, device=self.scenes.device)
        return Windows(self.latents[rows], self.scenes[rows], start, self.place[rows])


class Pool:
    """Grows to `capacity` windows, then replaces the oldest."""

    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor, capacity: int, device: torch.device) -> None:
        self.autoencoder = autoencoder
        self.mean, self.std = mean.view(1, 1, -1, 1, 1), std.view(1, 1, -1, 1, 1)
        self.capacity, self.device = capacity, device
        side = world.SIZE // autoencoder.config.spatial
        shape = (capacity, CHUNKS * CHUNK, autoencoder.config.latent_channels, side, side)
        self.latents = torch.empty(shape, dtype=torch.float16, device=device)
        self.scenes = torch.empty(capacity, CHUNKS, 4, dtype=torch.int64, device=device)
        self.start = torch.empty(capacity, dtype=torch.bool, device=device)
        self.place = torch.empty(capacity, CHUNKS * CHUNK, 2, device=device)
        self.filled = self.written = 0

    @torch.inference_mode()
    def grow(self, count: int, generator: torch.Generator) -> None:
        """Render and encode `count` new windows, a few at a time to bound memory. Mutates: the pool."""
        for done in range(0, count, GROUP):
            self._grow(min(GROUP, count - done), generator)

    def _grow(self, count: int, generator: torch.Generator) -> None:
        scenes = draw_scenes(count, CHUNKS, generator).to(self.device)
        start = (torch.rand(count, generator=generator) < STARTS).to(self.device)
        anywhere = torch.randint(world.CELLS, (count, 2), generator=generator).to(self.device) * world.LATTICE
        origin = torch.where(start[:, None], torch.full_like(anywhere, world.SIZE // 2), anywhere)
        frames, place = render_windows(scenes, origin)
        latents = encode_groups(self.autoencoder, frames)
        for i in range(count):
            slot = self.written % self.capacity
            self.latents[slot] = ((latents[i] - self.mean[0]) / self.std[0]).half()
            self.scenes[slot], self.start[slot], self.place[slot] = scenes[i], start[i], place[i]
            self.written += 1
        self.filled = min(self.written, self.capacity)

    def sample(self, count: int, generator: torch.Generator) -> Windows:
        rows = torch.randint(self.filled, (count,), generator=generator).to(self.device)
        latents = self.latents[rows].float().unflatten(1, (CHUNKS, CHUNK)).transpose(2, 3)
        place = self.place[rows].unflatten(1, (CHUNKS, CHUNK))
        return Windows(latents, self.scenes[rows], self.start[rows], place)


@torch.inference_mode()
def latent_statistics(autoencoder: TAEHV, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` of the autoencoder's latents over 256 latent frames of random scenes."""
    groups = []
    for _ in range(16):
        scenes = draw_scenes(16, 1, generator)[:, 0].to(device)
        place = torch.randint(world.CELLS, (16, 1, 2), generator=generator).to(device) * world.LATTICE
        step = world.velocities(str(device))[scenes[:, 2]][:, None]
        place = place + step * torch.arange(world.FRAMES_PER_LATENT, device=device)[:, None]
        color, shape, background = (scenes[:, i].repeat_interleave(world.FRAMES_PER_LATENT) for i in (0, 1, 3))
        frames = world.render(color, shape, background, place[..., 0].flatten(), place[..., 1].flatten())
        groups.append(encode_groups(autoencoder, frames.unflatten(0, (16, world.FRAMES_PER_LATENT))))
    latents = torch.cat(groups)
    return latents.mean((0, 1, 3, 4)), latents.std((0, 1, 3, 4))
