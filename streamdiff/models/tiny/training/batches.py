"""Training batches of the denoiser: windows of rendered clips, and the rows of each kind in the loss."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training import loop
from streamdiff.models.tiny.training.autoencoder import encode_groups

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
    (y, x) of the shape in pixels, halfway through each latent frame; video `[B, C, CHUNK, h, w]` or None: what the
    noisy copies of the last chunk show instead of it.
    """

    latents: Tensor
    scenes: Tensor
    start: Tensor
    place: Tensor
    video: Tensor | None = None

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
        self.scenes = scenes[loop.rank() :: loop.processes(), None]
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
        latents = self.encode(frames)
        for i in range(count):
            slot = self.written % self.capacity
            self.latents[slot] = latents[i].half()
            self.scenes[slot], self.start[slot], self.place[slot] = scenes[i], start[i], place[i]
            self.written += 1
        self.filled = min(self.written, self.capacity)

    def encode(self, frames: Tensor) -> Tensor:
        """Normalised latents `[B, T / 4, C, h, w]` of frames `[B, T, 3, SIZE, SIZE]`."""
        latents: Tensor = (encode_groups(self.autoencoder, frames) - self.mean) / self.std
        return latents

    def sample(self, count: int, generator: torch.Generator) -> Windows:
        rows = torch.randint(self.filled, (count,), generator=generator).to(self.device)
        latents = self.latents[rows].float().unflatten(1, (CHUNKS, CHUNK)).transpose(2, 3)
        place = self.place[rows].unflatten(1, (CHUNKS, CHUNK))
        return Windows(latents, self.scenes[rows], self.start[rows], place)


STATISTICS = 16
"""Groups of scenes that latent statistics are taken over."""


@torch.inference_mode()
def latent_statistics(autoencoder: TAEHV, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` of the autoencoder's latents over 256 latent frames of random scenes."""
    groups = []
    for _ in range(STATISTICS):
        scenes = draw_scenes(16, 1, generator)[:, 0].to(device)
        place = torch.randint(world.CELLS, (16, 1, 2), generator=generator).to(device) * world.LATTICE
        step = world.velocities(str(device))[scenes[:, 2]][:, None]
        place = place + step * torch.arange(world.FRAMES_PER_LATENT, device=device)[:, None]
        color, shape, background = (scenes[:, i].repeat_interleave(world.FRAMES_PER_LATENT) for i in (0, 1, 3))
        frames = world.render(color, shape, background, place[..., 0].flatten(), place[..., 1].flatten())
        groups.append(encode_groups(autoencoder, frames.unflatten(0, (16, world.FRAMES_PER_LATENT))))
    latents = torch.cat(groups)
    return latents.mean((0, 1, 3, 4)), latents.std((0, 1, 3, 4))


LEVELS = {4: sampling.schedule(4), 2: sampling.schedule(2)}


CONTEXT_SIGMA = 0.25
"""The level at which a stream remembers a finished chunk (decision 0011)."""


LOWEST = 0.2
"""The least noise that a step is trained on: with less, what is left to predict is detail that neither text nor past
determines, and its error is large whatever is learnt."""


COPIES = 2


VIDEO_SIGMA = (0.3, 0.8)
"""Levels between which a video that comes in is trained on."""


@dataclass(frozen=True)
class Rows:
    """One forward's worth of work: for every row its chunk of the window, sigma, and whether it has a target."""

    chunk: list[int]
    visible: list[list[int]]
    sigma: Tensor  # [B, rows]
    target: Tensor  # bool [B, rows]


def staircase_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Levels that rise from clean to noise along the window, as chunks of one session stand in the ring.

    Where a window starts a stream its first chunks may be anywhere on the stairs; elsewhere the first chunk must be
    clean, since the past it would need is not in the window.
    """
    batch = windows.latents.shape[0]
    steps = 4 if chance.random() < 0.75 else 2
    levels = torch.tensor([*LEVELS[steps], 0.0])
    newest = torch.randint(1000, (batch,), generator=generator)
    ahead = torch.where(newest < 600, 0, newest % 4) if steps == 4 else newest % 2
    base = torch.where(windows.start.cpu(), torch.randint(steps + 2, (batch,), generator=generator), CHUNKS - 1 + ahead)
    step = base[:, None] - torch.arange(CHUNKS)
    sigma = levels[step.clamp(0, steps)]
    target = (step >= 0) & (step < steps)
    return Rows(
        list(range(CHUNKS)), [list(range(i + 1)) for i in range(CHUNKS)], _context_noise(sigma, generator), target
    )


def clean_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3 and noisy copies of 0..4; a noisy copy sees the clean past and itself."""
    batch = windows.latents.shape[0]
    past = CHUNKS - 1
    sigma = torch.cat([torch.zeros(batch, past), _step_noise(batch, CHUNKS, generator)], 1)
    target = torch.cat([torch.zeros(batch, past, dtype=torch.bool), torch.ones(batch, CHUNKS, dtype=torch.bool)], 1)
    target[:, past] = windows.start.cpu()
    visible = [list(range(i + 1)) for i in range(past)] + [[*range(i), past + i] for i in range(CHUNKS)]
    return Rows([*range(past), *range(CHUNKS)], visible, _context_noise(sigma, generator), target)


def anchored_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3 and noisy copies of 0..4, all at one level, as at one step of `matched`. Anchors are
    seen clean where a stream's are: the first chunk by all, every Nth from step S - k on by the chunk k later.

    A window that does not start a stream has no target in its first chunk, whose past is not there.
    """
    batch, past = windows.latents.shape[0], CHUNKS - 1
    steps = 4 if chance.random() < 0.75 else 2
    step, every = chance.randrange(steps), chance.choice((None, 1, 2, 4))
    offset, sink = chance.randrange(every or 1), chance.random() < 0.5

    def seen(row: int, chunk: int) -> int:
        anchor = every is not None and chunk % every == offset and row - chunk >= steps - step
        clean = chunk < row and ((sink and chunk == 0) or anchor)
        return chunk if clean else past + chunk

    sigma = torch.cat([torch.zeros(batch, past), torch.full((batch, CHUNKS), LEVELS[steps][step])], 1)
    target = torch.cat([torch.zeros(batch, past, dtype=torch.bool), torch.ones(batch, CHUNKS, dtype=torch.bool)], 1)
    target[:, past] = windows.start.cpu()
    visible = [list(range(i + 1)) for i in range(past)]
    visible += [[seen(i, chunk) for chunk in range(i + 1)] for i in range(CHUNKS)]
    return Rows([*range(past), *range(CHUNKS)], visible, _context_noise(sigma, generator), target)


def video_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Like `next_rows`, at levels that leave something of the video to be seen."""
    rows = next_rows(windows, chance, generator)
    low, high = VIDEO_SIGMA
    level = low + (high - low) * torch.rand(rows.sigma.shape, generator=generator)
    return Rows(rows.chunk, rows.visible, torch.where(rows.target, level, rows.sigma), rows.target)


def first_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """First chunks of streams, one a window, that see nothing but themselves."""
    sigma = _step_noise(windows.latents.shape[0], 1, generator)
    return Rows([0], [[0]], sigma, torch.ones_like(sigma, dtype=torch.bool))


def next_rows(windows: Windows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Of all chunks but the last one clean copies, and `COPIES` noisy copies of the last, each of which sees them."""
    batch, chunks = windows.latents.shape[:2]
    past = chunks - 1
    sigma = torch.cat([torch.zeros(batch, past), _step_noise(batch, COPIES, generator)], 1)
    target = torch.arange(past + COPIES).expand(batch, -1) >= past
    visible = [list(range(i + 1)) for i in range(past)] + [[*range(past), past + copy] for copy in range(COPIES)]
    return Rows([*range(past), *[past] * COPIES], visible, _context_noise(sigma, generator), target)


def _step_noise(batch: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Levels `[batch, chunks]`: mostly those of the four sampling steps, the others anywhere above `LOWEST`."""
    levels = torch.tensor(LEVELS[4])[torch.randint(4, (batch, chunks), generator=generator)]
    anywhere = LOWEST + (1 - LOWEST) * torch.rand(batch, chunks, generator=generator)
    return torch.where(torch.rand(batch, chunks, generator=generator) < 0.85, levels, anywhere)


def _context_noise(sigma: Tensor, generator: torch.Generator) -> Tensor:
    """Lift half of the clean levels to at most 0.3: a finished chunk is remembered at 0.25 (decision 0011)."""
    lifted = 0.3 * torch.rand(sigma.shape, generator=generator)
    pick = torch.rand(sigma.shape, generator=generator) < 0.5
    return torch.where((sigma == 0) & pick, lifted, sigma)


ROWS = {
    "staircase": staircase_rows, "clean": clean_rows, "first": first_rows, "next": next_rows, "again": next_rows,
    "own": next_rows, "anchored": anchored_rows, "video": video_rows,
}  # fmt: skip
