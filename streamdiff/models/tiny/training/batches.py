"""Training batches of the denoiser: windows of rendered clips, and the rows of each kind in the loss."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.autoencoder.taehv import TAEHV, Memory
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training import loop
from streamdiff.models.tiny.training.autoencoder import encode_groups

CHUNK = 3
FRAMES = CHUNK * world.FRAMES_PER_LATENT
"""Of a chunk."""


CHUNKS = 5


CHANGE, REDRAW = 0.5, 0.45


STARTS = 0.25


GROUP = 8


WindowsT = TypeVar("WindowsT", bound="ChunkWindows")


@dataclass(frozen=True)
class ChunkWindows:
    """A batch of training windows of n chunks, CHUNKS unless cut, of any world.

    latents `[B, n, C, CHUNK, h, w]`, normalised; scenes int64 `[B, n, fields]`; start bool `[B]`, on the CPU: the
    window's first chunk is its stream's first; place float `[B, n, CHUNK, ..., 2]`: centres (y, x) of the shapes in
    pixels, halfway through each latent frame.
    """

    latents: Tensor
    scenes: Tensor
    start: Tensor
    place: Tensor

    side_px: ClassVar[int]
    """Of the picture."""
    by_chunk: ClassVar[tuple[str, ...]] = ("latents", "scenes", "place")
    """Fields that have a value for every chunk."""

    def cut(self, first: Tensor, chunks: int) -> Self:
        """`chunks` chunks of every window from chunk `first` `[B]`, on the CPU, on."""
        device = self.latents.device
        window = torch.arange(len(first), device=device)[:, None]
        chunk = (first[:, None] + torch.arange(chunks)).to(device, non_blocking=True)
        parts = {name: getattr(self, name)[window, chunk] for name in self.by_chunk}
        return replace(self, start=self.start & (first == 0), **parts)

    def drawn(self, low: float, high: float, generator: torch.Generator) -> Tensor:
        """A number from `low` to `high` for every window, `[B, 1, 1, 1, 1]`."""
        numbers = low + (high - low) * torch.rand(len(self.latents), generator=generator)
        return numbers.to(self.latents.device, non_blocking=True).view(-1, 1, 1, 1, 1)

    def from_centers(self) -> tuple[Tensor, Tensor]:
        """How far each row `[..., h]` and column `[..., w]` is from the centres `place` `[..., 2]`, in pixels."""
        side, half = self.side_px, self.side_px / 2
        height, width = self.latents.shape[-2:]
        y = (torch.arange(height, device=self.place.device) + 0.5) * (side / height)
        x = (torch.arange(width, device=self.place.device) + 0.5) * (side / width)
        dy = (y - self.place[..., 0, None] + half).remainder(side) - half
        dx = (x - self.place[..., 1, None] + half).remainder(side) - half
        return dy, dx


@dataclass(frozen=True)
class Windows(ChunkWindows):
    """Of the 128 pixel world: scenes `[B, n, 4]` (color, shape, motion, background), place `[B, n, CHUNK, 2]`; video
    `[B, C, CHUNK, h, w]` or None: what the noisy copies of the last chunk show instead of it."""

    video: Tensor | None = None

    side_px = world.SIZE

    def weight(self, near: float = 6.0, reach_px: float = 36.0) -> Tensor:
        """Loss weights `[B, n, 1, CHUNK, h, w]`: `near` around the shape, 1 elsewhere.

        The shape covers a tenth of the picture and is all that moves; unweighted, it is learnt last.
        """
        dy, dx = self.from_centers()
        far = dy[..., :, None].square() + dx[..., None, :].square() > reach_px**2
        return torch.where(far, 1.0, near).unsqueeze(2)


def draw_scenes(count: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Scenes `[count, chunks, 4]`: at every other boundary a prompt change that redraws about half of it."""
    sizes = map(len, world.ATTRIBUTES)
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
    per_frame = scenes.repeat_interleave(FRAMES, 1)
    step = world.velocities(str(scenes.device))[per_frame[..., 2]]
    place = (origin[:, None] + torch.cumsum(step, 1) - step).remainder(world.SIZE)
    color, shape, background = (per_frame[..., i].flatten() for i in (0, 1, 3))
    video = world.render(color, shape, background, place[..., 0].flatten(), place[..., 1].flatten())
    frames: Tensor = video.unflatten(0, per_frame.shape[:2])
    middle = place[:, :: world.FRAMES_PER_LATENT] + step[:, :: world.FRAMES_PER_LATENT] * 1.5
    return frames, middle.float()


class LatentEncoder:
    """Encodes frames as latents of mean 0 and deviation 1, and decodes such."""

    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor) -> None:
        """`mean` and `std` `[C]` are those of the autoencoder's latents."""
        self.autoencoder, self.device = autoencoder, mean.device
        self.mean, self.std = mean.view(1, 1, -1, 1, 1), std.view(1, 1, -1, 1, 1)

    @torch.no_grad()
    def __call__(self, frames: Tensor) -> Tensor:
        """Latents `[B, T / 4, C, h, w]` of frames `[B, T, 3, H, W]`."""
        latents: Tensor = (encode_groups(self.autoencoder, frames).float() - self.mean) / self.std
        return latents

    def last_frames(self, chunks: Tensor, count: int, at_once: int) -> Tensor:
        """The last `count` frames, at most four, `[B, count, 3, H, W]` of `chunks` `[B, C, CHUNK, h, w]`, `at_once` of
        which are decoded together."""
        latents = chunks[:, :, -2:].transpose(1, 2) * self.std + self.mean
        return torch.cat([self.autoencoder.decode(some, Memory())[:, -count:] for some in latents.split(at_once)])


@torch.no_grad()
def stream_latents(
    encode: LatentEncoder, scenes: Tensor, origin: Tensor, chunks: int, at_once: int = GROUP
) -> tuple[Tensor, Tensor]:
    """Latents `[B, chunks, C, CHUNK, h, w]` and places `[B, chunks, CHUNK, 2]` of streams of `scenes` `[B, 4]` whose
    shapes start at `origin` `[B, 2]`; `at_once` of them are rendered together."""
    latents, places = [], []
    for some, start in zip(scenes.split(at_once), origin.split(at_once), strict=True):
        frames, place = render_windows(some[:, None].expand(-1, chunks, -1), start)
        latents.append(encode(frames))
        places.append(place)
    made = torch.cat(latents).unflatten(1, (chunks, CHUNK)).transpose(2, 3)
    return made, torch.cat(places).unflatten(1, (chunks, CHUNK))


class Starts:
    """The first chunk of every stream there is: it follows from the scene alone. With several processes, a share."""

    def __init__(self, encode: LatentEncoder) -> None:
        scenes = torch.tensor([scene.indices() for scene in world.all_scenes()], device=encode.device)
        self.scenes = scenes[loop.rank() :: loop.processes(), None]
        own = self.scenes[:, 0]
        centre = torch.full_like(own[:, :2], world.SIZE // 2)
        self.latents, self.place = stream_latents(encode, own, centre, 1, GROUP * CHUNKS)

    def sample(self, count: int, generator: torch.Generator) -> Windows:
        """`count` windows of one chunk."""
        rows = torch.randint(len(self.scenes), (count,), generator=generator).to(self.scenes.device)
        start = torch.ones(count, dtype=torch.bool)
        return Windows(self.latents[rows], self.scenes[rows], start, self.place[rows])


class WindowPool(Generic[WindowsT]):
    """Grows to `capacity` windows of `chunks` chunks, then replaces the oldest. `parts` are the fields of `kind`, with
    frames in place of chunks `[capacity, chunks * CHUNK, ...]` in latents and place."""

    def __init__(self, kind: type[WindowsT], capacity: int, chunks: int, device: torch.device) -> None:
        self.kind, self.capacity, self.chunks, self.device = kind, capacity, chunks, device
        self.parts: dict[str, Tensor] = {}
        self.filled = self.written = 0

    def add(self, **parts: Tensor) -> None:
        """Keep new windows. Mutates: self."""
        count = len(parts["start"])
        slots = torch.arange(self.written, self.written + count) % self.capacity
        for name, new in parts.items():
            if name not in self.parts:
                self.parts[name] = new.new_empty(self.capacity, *new.shape[1:])
            self.parts[name][slots.to(new.device)] = new
        self.written += count
        self.filled = min(self.written, self.capacity)

    def sample(self, count: int, generator: torch.Generator) -> WindowsT:
        """`count` windows, drawn at random."""
        chosen = torch.randint(self.filled, (count,), generator=generator)
        rows = chosen.to(self.device, non_blocking=True)
        drawn = {name: part[chosen if name == "start" else rows] for name, part in self.parts.items()}
        for name in drawn.keys() & {"latents", "bare"}:
            drawn[name] = drawn[name].float().unflatten(1, (self.chunks, CHUNK)).transpose(2, 3)
        if "video" in drawn:
            drawn["video"] = drawn["video"].float().transpose(1, 2)
        drawn["place"] = drawn["place"].unflatten(1, (self.chunks, CHUNK))
        return self.kind(**drawn)


class Pool(WindowPool[Windows]):
    """Windows of random scenes."""

    def __init__(self, encode: LatentEncoder, capacity: int) -> None:
        super().__init__(Windows, capacity, CHUNKS, encode.device)
        self.encode = encode

    @torch.no_grad()
    def grow(self, count: int, generator: torch.Generator) -> None:
        """Render and encode `count` new windows, a few at a time to bound memory. Mutates: the pool."""
        for done in range(0, count, GROUP):
            self._grow(min(GROUP, count - done), generator)

    def _grow(self, count: int, generator: torch.Generator) -> None:
        scenes = draw_scenes(count, CHUNKS, generator).to(self.device)
        start = torch.rand(count, generator=generator) < STARTS
        anywhere = torch.randint(world.CELLS, (count, 2), generator=generator) * world.LATTICE
        origin = torch.where(start[:, None], torch.full_like(anywhere, world.SIZE // 2), anywhere)
        frames, place = render_windows(scenes, origin.to(self.device))
        self.add(latents=self.encode(frames).half(), scenes=scenes, start=start, place=place)


STATISTICS = 16
"""Groups of scenes that latent statistics are taken over."""


def latent_statistics(autoencoder: TAEHV, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` of the autoencoder's latents over 256 latent frames of random scenes."""

    def draw() -> Tensor:
        scenes = draw_scenes(16, 1, generator)[:, 0].to(device)
        place = torch.randint(world.CELLS, (16, 1, 2), generator=generator).to(device) * world.LATTICE
        step = world.velocities(str(device))[scenes[:, 2]][:, None]
        place = place + step * torch.arange(world.FRAMES_PER_LATENT, device=device)[:, None]
        color, shape, background = (scenes[:, i].repeat_interleave(world.FRAMES_PER_LATENT) for i in (0, 1, 3))
        frames = world.render(color, shape, background, place[..., 0].flatten(), place[..., 1].flatten())
        videos: Tensor = frames.unflatten(0, (16, world.FRAMES_PER_LATENT))
        return videos

    return statistics_of(autoencoder, (draw() for _ in range(STATISTICS)))


@torch.no_grad()
def statistics_of(autoencoder: TAEHV, videos: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` of the autoencoder's latents over videos `[B, T, 3, H, W]`."""
    latents = torch.cat([encode_groups(autoencoder, frames) for frames in videos]).float()
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


def causal(count: int) -> list[list[int]]:
    """The rows that each of `count` rows sees, where all see those before them and themselves."""
    return [list(range(i + 1)) for i in range(count)]


def staircase_rows(windows: ChunkWindows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Levels that rise from clean to noise along the window, as chunks of one session stand in the ring.

    Where a window starts a stream its first chunks may be anywhere on the stairs; elsewhere the first chunk must be
    clean, since the past it would need is not in the window.
    """
    batch = windows.latents.shape[0]
    steps = 4 if chance.random() < 0.75 else 2
    levels = torch.tensor([*LEVELS[steps], 0.0])
    newest = torch.randint(1000, (batch,), generator=generator)
    ahead = torch.where(newest < 600, 0, newest % 4) if steps == 4 else newest % 2
    base = torch.where(windows.start, torch.randint(steps + 2, (batch,), generator=generator), CHUNKS - 1 + ahead)
    step = base[:, None] - torch.arange(CHUNKS)
    sigma = levels[step.clamp(0, steps)]
    target = (step >= 0) & (step < steps)
    return Rows(list(range(CHUNKS)), causal(CHUNKS), _context_noise(sigma, generator), target)


def clean_rows(windows: ChunkWindows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3 and noisy copies of 0..4; a noisy copy sees the clean past and itself."""
    levels = _step_noise(len(windows.latents), CHUNKS, generator)
    return _both_copies(windows, levels, [[*range(i), CHUNKS - 1 + i] for i in range(CHUNKS)], generator)


def anchored_rows(windows: ChunkWindows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3 and noisy copies of 0..4, all at one level, as at one step of `matched`. Anchors are
    seen clean where a stream's are: the first chunk by all, every Nth from step S - k on by the chunk k later."""
    steps = 4 if chance.random() < 0.75 else 2
    step, every = chance.randrange(steps), chance.choice((None, 1, 2, 4))
    offset, sink = chance.randrange(every or 1), chance.random() < 0.5

    def seen(row: int, chunk: int) -> int:
        anchor = every is not None and chunk % every == offset and row - chunk >= steps - step
        clean = chunk < row and ((sink and chunk == 0) or anchor)
        return chunk if clean else CHUNKS - 1 + chunk

    levels = torch.full((len(windows.latents), CHUNKS), LEVELS[steps][step])
    return _both_copies(windows, levels, [[seen(i, chunk) for chunk in range(i + 1)] for i in range(CHUNKS)], generator)


def _both_copies(windows: ChunkWindows, levels: Tensor, visible: list[list[int]], generator: torch.Generator) -> Rows:
    """Clean copies of chunks 0..3, which see those before them, and noisy copies of 0..4, at `levels` `[B, CHUNKS]`,
    which see the rows `visible`.

    A window that does not start a stream has no target in its first chunk, whose past is not there.
    """
    batch, past = len(levels), CHUNKS - 1
    target = (torch.arange(past + CHUNKS) >= past).repeat(batch, 1)
    target[:, past] = windows.start
    sigma = _context_noise(torch.cat([torch.zeros(batch, past), levels], 1), generator)
    return Rows([*range(past), *range(CHUNKS)], [*causal(past), *visible], sigma, target)


def video_rows(windows: ChunkWindows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Like `next_rows`, at levels that leave something of the video to be seen."""
    rows = next_rows(windows, chance, generator)
    low, high = VIDEO_SIGMA
    level = low + (high - low) * torch.rand(rows.sigma.shape, generator=generator)
    return Rows(rows.chunk, rows.visible, torch.where(rows.target, level, rows.sigma), rows.target)


def first_rows(windows: ChunkWindows, chance: random.Random, generator: torch.Generator) -> Rows:
    """First chunks of streams, one a window, that see nothing but themselves."""
    sigma = _step_noise(windows.latents.shape[0], 1, generator)
    return Rows([0], [[0]], sigma, torch.ones_like(sigma, dtype=torch.bool))


def next_rows(windows: ChunkWindows, chance: random.Random, generator: torch.Generator) -> Rows:
    """Of all chunks but the last one clean copies, and `COPIES` noisy copies of the last, each of which sees them."""
    batch, chunks = windows.latents.shape[:2]
    past = chunks - 1
    sigma = torch.cat([torch.zeros(batch, past), _step_noise(batch, COPIES, generator)], 1)
    target = torch.arange(past + COPIES).expand(batch, -1) >= past
    visible = causal(past) + [[*range(past), past + copy] for copy in range(COPIES)]
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
