"""The autoencoder of the 256 pixel world, and what it is trained on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from streamdiff.models.tiny.training import autoencoder
from streamdiff.models.tiny.training.autoencoder import CLIP_LATENTS, Clips, Recipe
from streamdiff.models.tiny.world256 import weather
from streamdiff.models.tiny.world256.render import Window, render
from streamdiff.models.tiny.world256.scene import COLUMN, draw_scenes, redraw
from streamdiff.models.tiny.world256.tracks import FRAMES_PER_LATENT, SIZE, Streams, Track, join

AUTOENCODER = replace(
    autoencoder.AUTOENCODER,
    latent_channels=16,
    patch_size=4,
    decoder_widths=(64, 48, 32, 32),
    encoder_widths=(24, 24, 48, 64),
)
CROP = 128
CUT = 0.25
"""Share of the boundaries between latent frames at which the scene changes."""
CELL = AUTOENCODER.spatial
SEEN = 0.15
"""Cover from which on rain, snow or wind is seen."""
FALLING = 8.0
"""Weight of its pixels: at 4 the autoencoder left out rain, which is thin."""


def draw_clips(batch: int, crop: int, generator: torch.Generator, device: torch.device) -> Clips:
    """Clips of `CLIP_LATENTS` latent frames, `crop` pixels square and on the latent grid, three of four of them near a
    thing. Pixels of things weigh four times, those of what falls or blows in front of them `FALLING`."""
    track = draw_track(batch, generator)
    windows = [window for window in draw_windows(track, crop, generator) for _ in range(track.place.shape[1])]
    pictures = render(track.flat(), windows, str(device))
    view = (batch, CLIP_LATENTS * FRAMES_PER_LATENT, -1, crop, crop)
    weight = 1.0 + 3.0 * (pictures.things > 0.02).float()
    weight[_falling(track.flat(), windows).to(device)] = FALLING
    return Clips(pictures.frames.view(view), weight.view(view))


def _falling(track: Track, windows: list[Window]) -> Tensor:
    """Where rain, snow or wind is seen, bool `[N, 1, side, side]`: too little of a picture for its error to count."""
    _, covers = weather.falling(track.scenes[:, COLUMN["weather"]], track.fall, track.light)
    return torch.stack([cover[window.slices] for cover, window in zip(covers, windows, strict=True)])[:, None] > SEEN


def draw_track(count: int, generator: torch.Generator) -> Track:
    """`count` streams in the middle of their lives, over `CLIP_LATENTS` latent frames, with cuts."""
    scenes = draw_scenes(count, generator)
    streams, tracks = Streams(scenes, generator), []
    for latent in range(CLIP_LATENTS):
        if latent:
            cut = torch.rand(count, 1, generator=generator) < CUT
            scenes = torch.where(cut, redraw(scenes, 0.6, generator), scenes)
        tracks.append(streams.play(scenes, FRAMES_PER_LATENT))
    return join(tracks)


def draw_windows(track: Track, crop: int, generator: torch.Generator) -> list[Window]:
    """For every stream the part of the picture that is shown."""
    count = len(track.scenes)
    room = (SIZE - crop) // CELL
    anywhere = torch.randint(room + 1, (count, 2), generator=generator) * CELL
    middle = track.place.shape[1] // 2
    second = track.scenes[:, middle, COLUMN["second"]] * torch.randint(2, (count,), generator=generator)
    shift = (torch.randint(5, (count, 2), generator=generator) - 2) * CELL
    near = track.place[torch.arange(count), middle, second] + shift - crop // 2
    near = (near // CELL * CELL).clamp(0, SIZE - crop)
    chosen: Tensor = torch.where(torch.rand(count, 1, generator=generator) < 0.75, near, anywhere)
    return [Window(top, left, crop) for top, left in chosen.tolist()]


# The two ends are AdamW's: a matrix that is moved by Muon there shifts the colors of the whole picture at every step.
ENDS = ("encoder.0.", "decoder.18.")
RECIPE = Recipe(AUTOENCODER, draw_clips, CROP, SIZE, matrix_lr=4e-3, adam=ENDS)
