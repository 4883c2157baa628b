"""Training windows of the 256 pixel world: latents of consecutive chunks of a stream, and what each chunk shows.

A pool of windows is rendered and encoded once, grows while training runs, and is sampled many times. A share of the
windows is kept twice, with and without its things, so that things can be corrupted in chunks without a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny.training.batches import CHUNKS, ChunkWindows, LatentEncoder, WindowPool, statistics_of
from streamdiff.models.tiny.training.corruption import SHARE
from streamdiff.models.tiny.world256.render_batch import draw_frames
from streamdiff.models.tiny.world256.scene import COLUMN, HOURS, SIZES, THING_TABLES, draw_scenes, redraw, tidy
from streamdiff.models.tiny.world256.shapes import RADIUS
from streamdiff.models.tiny.world256.tracks import SIZE, Streams, Track, join

CHANGE, REDRAW = 0.5, 0.3
STARTS = 0.25
"""Share of the windows that begin a stream."""
RENDERED = {"cpu": 4, "cuda": 32}
"""Windows rendered at once: a chunk of frames takes 9 MB, on a GPU 120 MB."""


@dataclass(frozen=True)
class Windows(ChunkWindows):
    """Of the 256 pixel world: place `[B, n, CHUNK, 2, 2]`, of both things; bare like latents, but without things (in
    windows that are not to be corrupted, with them); ids int64 `[B, n, tokens]`: those of the scenes' sentences; video
    `[B, C, CHUNK, h, w]` or None: what the noisy copies of the last chunk show instead of it."""

    bare: Tensor
    ids: Tensor
    video: Tensor | None = None

    side_px = SIZE
    by_chunk = (*ChunkWindows.by_chunk, "bare", "ids")

    def reach(self) -> Tensor:
        """How far each latent pixel is from each thing's centre, in radii of that thing, `[B, n, CHUNK, 2, h, w]`; far
        away where there is no thing."""
        dy, dx = self.from_centers()
        radius = torch.tensor([RADIUS[name] for name in SIZES]).to(self.place.device, non_blocking=True)
        sizes = torch.stack([self.scenes[..., COLUMN[name]] for name in ("size", "second_size")], -1)
        there = torch.stack([torch.ones_like(sizes[..., 0]), self.scenes[..., COLUMN["second"]]], -1)
        away = (dy[..., :, None].square() + dx[..., None, :].square()).sqrt()
        scaled: Tensor = away / radius[sizes][:, :, None, :, None, None]
        return torch.where(there[:, :, None, :, None, None] > 0, scaled, 99.0)

    def weight(self, near: float = 6.0) -> Tensor:
        """Loss weights `[B, n, 1, CHUNK, h, w]`: `near` around things, 1 elsewhere; twice as much at night, when there
        is half as much to be seen."""
        night = self.scenes[..., COLUMN["hour"]] == HOURS.index("night")
        dark = torch.where(night, 2.0, 1.0).view(*night.shape, 1, 1, 1, 1)
        return dark * torch.where(self.reach().amin(3) < 1.5, near, 1.0).unsqueeze(2)

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
    old.put(start, new.rows(start))
    return old


class TrackEncoder(LatentEncoder):
    """Draws tracks and encodes their frames; and the sentences of their scenes."""

    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor, tokens: Callable[[Tensor], Tensor]) -> None:
        """`tokens` gives the ids `[..., tokens]` of the sentences of scenes `[..., fields]`."""
        super().__init__(autoencoder, mean, std)
        self.tokens = tokens

    def latents_of(self, track: Track, things: bool = True) -> Tensor:
        """Latents `[B, T / 4, C, h, w]` of the frames of `track`, a few streams at a time to bound memory."""
        made = []
        for rows in torch.arange(len(track.scroll)).split(RENDERED[self.device.type]):
            some = track.rows(rows)
            made.append(self(draw_frames(some.flat(), self.device, things).unflatten(0, some.scroll.shape)))
        return torch.cat(made)


class Pool(WindowPool[Windows]):
    """Windows of random scenes, a share of which, `starts`, begin a stream."""

    def __init__(self, encode: TrackEncoder, capacity: int, chunks: int = CHUNKS, starts: float = STARTS) -> None:
        super().__init__(Windows, capacity, chunks, encode.device)
        self.encode, self.starts = encode, starts

    @torch.no_grad()
    def grow(self, count: int, generator: torch.Generator) -> None:
        """Render and encode `count` new windows. Mutates: the pool."""
        scenes = draw_window_scenes(count, self.chunks, generator)
        start = torch.rand(count, generator=generator) < self.starts
        track = play(scenes, start, generator)
        corrupted = torch.rand(count, generator=generator) < SHARE
        latents = self.encode.latents_of(track)
        bare, rows = latents.clone(), corrupted.nonzero()[:, 0]
        if len(rows):
            bare[rows.to(self.device)] = self.encode.latents_of(track.rows(rows), False)
        self._keep(latents, bare, start, scenes, track)

    def _keep(self, latents: Tensor, bare: Tensor, start: Tensor, scenes: Tensor, track: Track, **more: Tensor) -> None:
        on_device = {"scenes": scenes, "ids": self.encode.tokens(scenes), "place": track.middles()}
        parts = {name: part.to(self.device) for name, part in on_device.items()}
        self.add(latents=latents.half(), bare=bare.half(), start=start, **parts, **more)


class LostPool(Pool):
    """Windows of two chunks: a thing that is said, but missing in the first, begins in the second as in a new stream.
    So a stream that has lost a thing gets it back."""

    def __init__(self, encode: TrackEncoder, capacity: int) -> None:
        super().__init__(encode, capacity, chunks=2, starts=0.0)

    @torch.no_grad()
    def grow(self, count: int, generator: torch.Generator) -> None:
        scenes = draw_scenes(count, generator)
        streams = Streams(scenes, generator)
        two = scenes[:, COLUMN["second"]]
        lost = two * torch.randint(2, (count,), generator=generator)
        before = streams.play(scenes)
        streams.lose(scenes, torch.stack([lost == 0, lost == 1], 1))
        after = streams.play(scenes)
        past, alone = self.encode.latents_of(only(before, two - lost)), (two == 0).nonzero()[:, 0]
        if len(alone):
            past[alone.to(past.device)] = self.encode.latents_of(before.rows(alone), False)
        latents = torch.cat([past, self.encode.latents_of(after)], 1)
        every = scenes[:, None].expand(-1, 2, -1)
        self._keep(latents, latents, torch.zeros(count, dtype=torch.bool), every, join([before, after]))


def only(track: Track, thing: Tensor) -> Track:
    """`track` with `thing` int64 `[N]`, 0 or 1, as the only one."""
    first = slice(0, len(THING_TABLES))
    second = slice(COLUMN["second"] + 1, COLUMN["second"] + 1 + len(THING_TABLES))
    scenes, rows = track.scenes.clone(), torch.arange(len(thing))
    scenes[..., first] = torch.where(thing[:, None, None] == 1, scenes[..., second], scenes[..., first])
    scenes[..., COLUMN["second"]] = 0
    place, angle = (
        torch.stack([part[rows, :, thing], part[rows, :, 1 - thing]], 2) for part in (track.place, track.angle)
    )
    return replace(track, scenes=tidy(scenes.flatten(0, 1)).unflatten(0, scenes.shape[:2]), place=place, angle=angle)


STATISTICS = 16
"""Groups of scenes that latent statistics are taken over."""


def latent_statistics(autoencoder: TAEHV, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` of the autoencoder's latents over 192 latent frames of random scenes."""

    def draw() -> Tensor:
        scenes = draw_scenes(4, generator)
        track = Streams(scenes, generator).play(scenes)
        videos: Tensor = draw_frames(track.flat(), device).unflatten(0, track.scroll.shape)
        return videos

    return statistics_of(autoencoder, (draw() for _ in range(STATISTICS)))
