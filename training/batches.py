"""Training data of the denoiser: streams of random scenes, drawn, encoded, and kept as windows in pools.

A pool of windows is rendered and encoded once, grows while training runs, and is sampled many times. A share of the
windows is kept twice, with and without its things, so that things can be corrupted in chunks without a target: a stream
attends to what the model itself has made, and a model that was only trained on perfect pasts copies its small errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from streamdiff.models.autoencoder.taehv import TAEHV, TaehvMemory
from streamdiff.models.tiny.scene import HOURS, THING_TABLES
from training.autoencoder import encode_groups
from training.keys import draw_controls
from training.scene_rows import COLUMN
from training.windows import CHUNK, CHUNKS, Windows
from training.world.render_batch import draw_frames
from training.world.scenes import draw_scenes, redraw, tidy
from training.world.tracks import CHUNK_FRAMES, CONTROLS, Streams, Track, join

CHANGE, REDRAW = 0.5, 0.3
STARTS = 0.25
"""Share of the windows that begin a stream."""
CORRUPTED = 0.3
"""Share of the windows whose past is corrupted."""
LOST = 0.2
"""Share of the windows that begin no stream, whose first chunk lacks a thing."""
STALLED = 0.3
"""Share of the windows of time that passes and that begin no stream, in whose first chunk the light stands still."""
RENDERED = {"cpu": 4, "cuda": 32}
"""Windows rendered at once: a chunk of frames takes 9 MB, on a GPU 120 MB."""


def draw_window_scenes(count: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Scenes `[count, chunks, fields]`: at half of the boundaries a prompt change that redraws a third of it."""
    scenes = [draw_scenes(count, generator)]
    for _ in range(chunks - 1):
        change = torch.rand(count, 1, generator=generator) < CHANGE
        scenes.append(torch.where(change, redraw(scenes[-1], REDRAW, generator), scenes[-1]))
    return torch.stack(scenes, 1)


def play(
    scenes: Tensor, start: Tensor, lost: Tensor, generator: torch.Generator, controls: Tensor | None = None
) -> Track:
    """Streams over the chunks of `scenes` `[B, n, fields]`, steered by `controls` `[B, n, CHUNK, K]` (None: by none);
    those not in `start` bool `[B]` have begun long ago. Things in `lost` bool `[B, 2]` begin with the second chunk as
    in a new stream."""
    controls = torch.zeros(*scenes.shape[:2], CHUNK, len(CONTROLS)) if controls is None else controls
    tracks = []
    for streams in (Streams(scenes[:, 0]), Streams(scenes[:, 0], generator)):
        chunks = []
        for at, (scene, steered) in enumerate(zip(scenes.unbind(1), controls.unbind(1), strict=True)):
            streams.lose(scene, lost & (at == 1))
            chunks.append(streams.play(scene, controls=steered))
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


def stall(track: Track, share: float, start: Tensor, generator: torch.Generator) -> None:
    """Let light that passes stand still in the first chunk of a `share` of the windows that are not in `start` bool
    `[N]`, where it is when that is over: so a stream whose light has stopped goes on. Mutates: track."""
    passing = track.scenes[:, 0, COLUMN["hour"]] == HOURS.index("passing")
    stalled = passing & ~start & (torch.rand(len(start), generator=generator) < share)
    track.light[stalled, :CHUNK_FRAMES] = track.light[stalled, CHUNK_FRAMES - 1 : CHUNK_FRAMES]


class TrackEncoder:
    """Draws tracks and encodes their frames as latents of mean 0 and deviation 1; decodes such; and tokenizes the
    sentences of scenes."""

    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor, tokens: Callable[[Tensor], Tensor]) -> None:
        """`mean` and `std` `[C]` are those of the autoencoder's latents; `tokens` gives the ids `[..., tokens]` of the
        sentences of scenes `[..., fields]`."""
        self.autoencoder, self.device, self.tokens = autoencoder, mean.device, tokens
        self.mean, self.std = mean.view(1, 1, -1, 1, 1), std.view(1, 1, -1, 1, 1)

    @torch.no_grad()
    def latents_of(self, track: Track, things: bool = True) -> Tensor:
        """Latents `[B, T / 4, C, h, w]` of the frames of `track`, a few streams at a time to bound memory."""
        made = []
        for rows in torch.arange(len(track.scroll)).split(RENDERED[self.device.type]):
            some = track.rows(rows)
            frames = draw_frames(some.flat(), self.device, things).unflatten(0, some.scroll.shape)
            made.append((encode_groups(self.autoencoder, frames).float() - self.mean) / self.std)
        return torch.cat(made)

    def last_frames(self, chunks: Tensor, count: int, at_once: int) -> Tensor:
        """The last `count` frames, at most four, `[B, count, 3, H, W]` of `chunks` `[B, C, CHUNK, h, w]`, `at_once` of
        which are decoded together."""
        latents = chunks[:, :, -2:].transpose(1, 2) * self.std + self.mean
        return torch.cat([self.autoencoder.decode(some, TaehvMemory())[:, -count:] for some in latents.split(at_once)])


class Pool:
    """Windows of `chunks` chunks of random scenes: grows to `capacity` of them, then replaces the oldest.

    A share of them, `starts`, begin a stream. In a share `lost` of the others a thing is missing in the first chunk,
    and begins in the second as in a new stream: so a stream that has lost a thing gets it back. `parts` are the fields
    of `Windows`, with frames in place of chunks `[capacity, chunks * CHUNK, ...]` in latents, bare and place.
    """

    def __init__(
        self, encode: TrackEncoder, capacity: int, chunks: int = CHUNKS, starts: float = STARTS, lost: float = LOST
    ) -> None:
        self.encode, self.starts, self.lost = encode, starts, lost
        self.capacity, self.chunks, self.device = capacity, chunks, encode.device
        self.parts: dict[str, Tensor] = {}
        self.filled = self.written = 0

    @torch.no_grad()
    def grow(self, count: int, generator: torch.Generator) -> None:
        """Render and encode `count` new windows. Mutates: the pool."""
        scenes = draw_window_scenes(count, self.chunks, generator)
        start = torch.rand(count, generator=generator) < self.starts
        lost = draw_lost(scenes[:, 0], self.lost, generator) & ~start[:, None]
        controls = draw_controls(count, self.chunks, generator)
        track = play(scenes, start, lost, generator, controls)
        stall(track, STALLED, start, generator)
        latents = self.encode.latents_of(track)
        if len(rows := lost.any(1).nonzero()[:, 0]):
            first = track.rows(rows).each(lambda part: part[:, :CHUNK_FRAMES])
            latents[rows.to(self.device), :CHUNK] = self._without(first, lost[rows])
        corrupted = (torch.rand(count, generator=generator) < CORRUPTED) & ~lost.any(1)
        bare = latents.clone()
        if len(rows := corrupted.nonzero()[:, 0]):
            bare[rows.to(self.device)] = self.encode.latents_of(track.rows(rows), False)
        self._keep(latents, bare, start, scenes, track, controls=controls)

    def _without(self, track: Track, lost: Tensor) -> Tensor:
        """Latents of `track` without the things `lost` bool `[N, 2]`, one of each."""
        two = track.scenes[:, 0, COLUMN["second"]]
        latents = self.encode.latents_of(only(track, two * lost[:, 0]))
        if len(alone := (two == 0).nonzero()[:, 0]):
            latents[alone.to(self.device)] = self.encode.latents_of(track.rows(alone), False)
        return latents

    def _keep(self, latents: Tensor, bare: Tensor, start: Tensor, scenes: Tensor, track: Track, **more: Tensor) -> None:
        more = {"controls": torch.zeros(*scenes.shape[:2], CHUNK, len(CONTROLS)), **more}
        on_device = {"scenes": scenes, "ids": self.encode.tokens(scenes), "place": track.middles(), **more}
        parts = {name: part.to(self.device) for name, part in on_device.items()}
        parts |= {"latents": latents.half(), "bare": bare.half(), "start": start}
        slots = torch.arange(self.written, self.written + len(start)) % self.capacity
        for name, new in parts.items():
            if name not in self.parts:
                self.parts[name] = new.new_empty(self.capacity, *new.shape[1:])
            self.parts[name][slots.to(new.device)] = new
        self.written += len(start)
        self.filled = min(self.written, self.capacity)

    def save(self, file: Path) -> None:
        """Write the windows, with which a run that was stopped goes on at once (`load`)."""
        torch.save({"parts": self.parts, "written": self.written}, file)

    def load(self, file: Path) -> None:
        """Hold the windows of another pool of this kind. Mutates: the pool."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.parts, self.written = state["parts"], state["written"]
        self.parts["start"] = self.parts["start"].cpu()
        self.filled = min(self.written, self.capacity)

    def sample(self, count: int, generator: torch.Generator) -> Windows:
        """`count` windows, drawn at random."""
        chosen = torch.randint(self.filled, (count,), generator=generator)
        rows = chosen.to(self.device, non_blocking=True)
        drawn = {name: part[chosen if name == "start" else rows] for name, part in self.parts.items()}
        for name in drawn.keys() & {"latents", "bare"}:
            drawn[name] = drawn[name].float().unflatten(1, (self.chunks, CHUNK)).transpose(2, 3)
        if "video" in drawn:
            drawn["video"] = drawn["video"].float().transpose(1, 2)
        drawn["place"] = drawn["place"].unflatten(1, (self.chunks, CHUNK))
        return Windows(**drawn)


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


@torch.no_grad()
def latent_statistics(autoencoder: TAEHV, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` of the autoencoder's latents over 192 latent frames of random scenes."""
    groups = []
    for _ in range(STATISTICS):
        scenes = draw_scenes(4, generator)
        track = Streams(scenes, generator).play(scenes)
        frames = draw_frames(track.flat(), device).unflatten(0, track.scroll.shape)
        groups.append(encode_groups(autoencoder, frames).float())
    latents = torch.cat(groups)
    return latents.mean((0, 1, 3, 4)), latents.std((0, 1, 3, 4))
