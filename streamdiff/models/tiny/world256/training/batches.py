"""Training windows of the 256 pixel world: latents of consecutive chunks of a stream, and what each chunk shows.

A pool of windows is rendered and encoded once, grows while training runs, and is sampled many times. A share of the
windows is kept twice, with and without its things, so that things can be corrupted in chunks without a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny.training.autoencoder import encode_groups
from streamdiff.models.tiny.training.batches import CHUNK, CHUNKS
from streamdiff.models.tiny.training.corruption import SHARE
from streamdiff.models.tiny.world256.render_batch import draw_frames
from streamdiff.models.tiny.world256.scene import COLUMN, FIELDS, SIZES, draw_scenes, redraw
from streamdiff.models.tiny.world256.shapes import RADIUS
from streamdiff.models.tiny.world256.text_encoder import TEXT_TOKENS
from streamdiff.models.tiny.world256.tracks import FRAMES_PER_LATENT, SIZE, Streams, Track, join

CHANGE, REDRAW = 0.5, 0.3
STARTS = 0.25
"""Share of the windows that begin a stream."""
RENDERED = {"cpu": 4, "cuda": 32}
"""Windows rendered at once: a chunk of frames takes 9 MB, on a GPU 120 MB."""


@dataclass(frozen=True)
class Windows:
    """A batch of training windows of n chunks.

    latents and bare `[B, n, C, CHUNK, h, w]`, normalised, with and without things (in windows that are not to be
    corrupted, both with them); scenes int64 `[B, n, fields]`, ids int64 `[B, n, tokens]`: those of their sentences;
    start bool `[B]`, on the CPU: the first chunk is its stream's first; place float `[B, n, CHUNK, 2, 2]`: centres
    (y, x) of both things in pixels, halfway through each latent frame.
    """

    latents: Tensor
    bare: Tensor
    scenes: Tensor
    ids: Tensor
    start: Tensor
    place: Tensor

    def cut(self, first: Tensor, chunks: int) -> Windows:
        """`chunks` chunks of every window from chunk `first` `[B]`, on the CPU, on."""
        device = self.latents.device
        window = torch.arange(len(first), device=device)[:, None]
        chunk = (first[:, None] + torch.arange(chunks)).to(device, non_blocking=True)
        latents, bare, scenes, ids, place = (
            part[window, chunk] for part in (self.latents, self.bare, self.scenes, self.ids, self.place)
        )
        return Windows(latents, bare, scenes, ids, self.start & (first == 0), place)

    def reach(self) -> Tensor:
        """How far each latent pixel is from each thing's centre, in radii of that thing, `[B, n, CHUNK, 2, h, w]`; far
        away where there is no thing."""
        height, width = self.latents.shape[-2:]
        device = self.place.device
        y = (torch.arange(height, device=device) + 0.5) * (SIZE / height)
        x = (torch.arange(width, device=device) + 0.5) * (SIZE / width)
        dy = (y - self.place[..., 0, None] + SIZE / 2).remainder(SIZE) - SIZE / 2
        dx = (x - self.place[..., 1, None] + SIZE / 2).remainder(SIZE) - SIZE / 2
        radius = torch.tensor([RADIUS[name] for name in SIZES]).to(device, non_blocking=True)
        sizes = torch.stack([self.scenes[..., COLUMN[name]] for name in ("size", "second_size")], -1)
        there = torch.stack([torch.ones_like(sizes[..., 0]), self.scenes[..., COLUMN["second"]]], -1)
        away = (dy[..., :, None].square() + dx[..., None, :].square()).sqrt()
        scaled: Tensor = away / radius[sizes][:, :, None, :, None, None]
        return torch.where(there[:, :, None, :, None, None] > 0, scaled, 99.0)

    def weight(self, near: float = 6.0) -> Tensor:
        """Loss weights `[B, n, 1, CHUNK, h, w]`: `near` around things, 1 elsewhere."""
        return torch.where(self.reach().amin(3) < 1.5, near, 1.0).unsqueeze(2)

    def corrupted(self, generator: torch.Generator) -> Tensor:
        """Latents with things faded, shrunk, or full of holes, in all chunks of the windows to be corrupted."""
        batch, device = len(self.latents), self.latents.device

        def draw(low: float, high: float) -> Tensor:
            drawn = low + (high - low) * torch.rand(batch, generator=generator)
            return drawn.to(device, non_blocking=True).view(-1, 1, 1, 1, 1)

        reach = self.reach().amin(3)
        kind = torch.randint(3, (batch,), generator=generator).to(device, non_blocking=True).view(-1, 1, 1, 1, 1)
        rows = torch.arange(reach.shape[-1], device=device) % 2
        patchy = (rows[:, None] ^ rows).float().expand_as(reach)
        missing = torch.where(
            kind == 0, draw(0.2, 0.9), torch.where(kind == 1, (reach > draw(0.3, 0.9)).float(), patchy)
        )
        return torch.lerp(self.latents, self.bare, missing.unsqueeze(2).expand_as(self.latents))


def draw_window_scenes(count: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Scenes `[count, chunks, fields]`: at half of the boundaries a prompt change that redraws a third of it."""
    scenes = [draw_scenes(count, generator)]
    for _ in range(chunks - 1):
        change = torch.rand(count, 1, generator=generator) < CHANGE
        scenes.append(torch.where(change, redraw(scenes[-1], REDRAW, generator), scenes[-1]))
    return torch.stack(scenes, 1)


def play(scenes: Tensor, start: Tensor, generator: torch.Generator) -> Track:
    """Streams over the chunks of `scenes` `[B, n, fields]`; those not in `start` bool `[B]` have begun long ago."""
    tracks = []
    for streams in (Streams(scenes[:, 0]), Streams(scenes[:, 0], generator)):
        tracks.append(join([streams.play(scenes[:, chunk]) for chunk in range(scenes.shape[1])]))
    new, old = tracks
    merged = {}
    for field in fields(Track):
        begun, running = getattr(new, field.name), getattr(old, field.name)
        merged[field.name] = torch.where(start.view(-1, *[1] * (begun.ndim - 1)), begun, running)
    return Track(**merged)


class TrackEncoder:
    """Draws tracks and encodes their frames as latents of mean 0 and deviation 1; and the sentences of their scenes."""

    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor, tokens: Callable[[Tensor], Tensor]) -> None:
        """`mean` and `std` `[C]` are those of the autoencoder's latents; `tokens` gives the ids `[..., tokens]` of the
        sentences of scenes `[..., fields]`."""
        self.autoencoder, self.tokens, self.device = autoencoder, tokens, mean.device
        self.mean, self.std = mean.view(1, 1, -1, 1, 1), std.view(1, 1, -1, 1, 1)

    @torch.no_grad()
    def __call__(self, track: Track, things: bool = True) -> Tensor:
        """Latents `[B, T / 4, C, h, w]` of the frames of `track`, a few streams at a time to bound memory."""
        made = []
        for rows in torch.arange(len(track.scroll)).split(RENDERED[self.device.type]):
            some = track.rows(rows)
            frames = draw_frames(some.flat(), self.device, things).unflatten(0, some.scroll.shape)
            made.append((encode_groups(self.autoencoder, frames).float() - self.mean) / self.std)
        return torch.cat(made)


class Pool:
    """Grows to `capacity` windows of `chunks` chunks, then replaces the oldest."""

    def __init__(self, encode: TrackEncoder, capacity: int, chunks: int = CHUNKS, starts: float = STARTS) -> None:
        self.encode, self.device = encode, encode.device
        self.capacity, self.chunks, self.starts = capacity, chunks, starts
        config = encode.autoencoder.config
        side = SIZE // config.spatial
        shape = (2, capacity, chunks * CHUNK, config.latent_channels, side, side)
        self.latents = torch.empty(shape, dtype=torch.float16, device=self.device)
        self.scenes = torch.empty(capacity, chunks, len(FIELDS), dtype=torch.int64, device=self.device)
        self.ids = torch.empty(capacity, chunks, TEXT_TOKENS, dtype=torch.int64, device=self.device)
        self.start = torch.empty(capacity, dtype=torch.bool)
        self.place = torch.empty(capacity, chunks * CHUNK, 2, 2, device=self.device)
        self.filled = self.written = 0

    @torch.no_grad()
    def grow(self, count: int, generator: torch.Generator) -> None:
        """Render and encode `count` new windows. Mutates: the pool."""
        scenes = draw_window_scenes(count, self.chunks, generator)
        start = torch.rand(count, generator=generator) < self.starts
        track, ids = play(scenes, start, generator), self.encode.tokens(scenes)
        corrupted = torch.rand(count, generator=generator) < SHARE
        middle = track.place[:, FRAMES_PER_LATENT // 2 :: FRAMES_PER_LATENT].float()
        slots = torch.arange(self.written, self.written + count) % self.capacity
        self.start[slots] = start
        slots = slots.to(self.device)
        latents = self.encode(track)
        bare, rows = latents.clone(), corrupted.nonzero()[:, 0]
        if len(rows):
            bare[rows.to(self.device)] = self.encode(track.rows(rows), False)
        self.latents[0, slots], self.latents[1, slots] = latents.half(), bare.half()
        for own, new in ((self.scenes, scenes), (self.ids, ids), (self.place, middle)):
            own[slots] = new.to(self.device)
        self.written += count
        self.filled = min(self.written, self.capacity)

    def sample(self, count: int, generator: torch.Generator) -> Windows:
        chosen = torch.randint(self.filled, (count,), generator=generator)
        rows = chosen.to(self.device, non_blocking=True)
        latents, bare = (each[rows].float().unflatten(1, (self.chunks, CHUNK)).transpose(2, 3) for each in self.latents)
        place = self.place[rows].unflatten(1, (self.chunks, CHUNK))
        return Windows(latents, bare, self.scenes[rows], self.ids[rows], self.start[chosen], place)


STATISTICS = 16
"""Groups of scenes that latent statistics are taken over."""


@torch.no_grad()
def latent_statistics(autoencoder: TAEHV, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` of the autoencoder's latents over 192 latent frames of random scenes."""
    groups = []
    for _ in range(STATISTICS):
        scenes = draw_scenes(4, generator)
        track = Streams(scenes, generator).play(scenes)
        frames = draw_frames(track.flat(), device)
        groups.append(encode_groups(autoencoder, frames.unflatten(0, track.scroll.shape)))
    latents = torch.cat(groups).float()
    return latents.mean((0, 1, 3, 4)), latents.std((0, 1, 3, 4))
