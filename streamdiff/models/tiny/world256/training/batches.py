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
from streamdiff.models.tiny.training.batches import (
    CHUNK,
    CHUNKS,
    ChunkWindows,
    LatentEncoder,
    WindowPool,
    statistics_of,
)
from streamdiff.models.tiny.training.corruption import SHARE
from streamdiff.models.tiny.world256.render_batch import draw_frames
from streamdiff.models.tiny.world256.scene import COLUMN, HOURS, SIZES, THING_TABLES, draw_scenes, redraw, tidy
from streamdiff.models.tiny.world256.shapes import RADIUS
from streamdiff.models.tiny.world256.tracks import CHUNK_FRAMES, SIZE, Streams, Track, join

CHANGE, REDRAW = 0.5, 0.3
STARTS = 0.25
"""Share of the windows that begin a stream."""
LOST = 0.2
"""Share of the other windows whose first chunk lacks a thing."""
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


def play(scenes: Tensor, start: Tensor, lost: Tensor, generator: torch.Generator) -> Track:
    """Streams over the chunks of `scenes` `[B, n, fields]`; those not in `start` bool `[B]` have begun long ago. Things
    in `lost` bool `[B, 2]` begin with the second chunk as in a new stream."""
    tracks = []
    for streams in (Streams(scenes[:, 0]), Streams(scenes[:, 0], generator)):
        chunks = [streams.play(scenes[:, 0])]
        for at, scene in enumerate(scenes[:, 1:].unbind(1)):
            streams.lose(scene, lost & (at == 0))
            chunks.append(streams.play(scene))
        tracks.append(join(chunks))
    new, old = tracks
    old.put(start, new.rows(start))
    return old


def draw_lost(scenes: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """One thing of each of a `share` of `scenes` `[N, fields]`, bool `[N, 2]`."""
    which = scenes[:, COLUMN["second"]] * torch.randint(2, (len(scenes),), generator=generator)
    chosen = torch.rand(len(scenes), generator=generator) < share
    lost: Tensor = chosen[:, None] & (which[:, None] == torch.arange(2))
    return lost


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
    """Windows of random scenes. A share of them, `starts`, begin a stream. In a share `lost` of the others a thing is
    missing in the first chunk, and begins in the second as in a new stream: so a stream that has lost a thing gets it
    back."""

    def __init__(
        self, encode: TrackEncoder, capacity: int, chunks: int = CHUNKS, starts: float = STARTS, lost: float = LOST
    ) -> None:
        super().__init__(Windows, capacity, chunks, encode.device)
        self.encode, self.starts, self.lost = encode, starts, lost

    @torch.no_grad()
    def grow(self, count: int, generator: torch.Generator) -> None:
        """Render and encode `count` new windows. Mutates: the pool."""
        scenes = draw_window_scenes(count, self.chunks, generator)
        start = torch.rand(count, generator=generator) < self.starts
        lost = draw_lost(scenes[:, 0], self.lost, generator) & ~start[:, None]
        track = play(scenes, start, lost, generator)
        latents = self.encode.latents_of(track)
        if len(rows := lost.any(1).nonzero()[:, 0]):
            first = track.rows(rows).each(lambda part: part[:, :CHUNK_FRAMES])
            latents[rows.to(self.device), :CHUNK] = self._without(first, lost[rows])
        corrupted = (torch.rand(count, generator=generator) < SHARE) & ~lost.any(1)
        bare = latents.clone()
        if len(rows := corrupted.nonzero()[:, 0]):
            bare[rows.to(self.device)] = self.encode.latents_of(track.rows(rows), False)
        self._keep(latents, bare, start, scenes, track)

    def _without(self, track: Track, lost: Tensor) -> Tensor:
        """Latents of `track` without the things `lost` bool `[N, 2]`, one of each."""
        two = track.scenes[:, 0, COLUMN["second"]]
        latents = self.encode.latents_of(only(track, two * lost[:, 0]))
        if len(alone := (two == 0).nonzero()[:, 0]):
            latents[alone.to(self.device)] = self.encode.latents_of(track.rows(alone), False)
        return latents

    def _keep(self, latents: Tensor, bare: Tensor, start: Tensor, scenes: Tensor, track: Track, **more: Tensor) -> None:
        on_device = {"scenes": scenes, "ids": self.encode.tokens(scenes), "place": track.middles()}
        parts = {name: part.to(self.device) for name, part in on_device.items()}
        self.add(latents=latents.half(), bare=bare.half(), start=start, **parts, **more)


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
