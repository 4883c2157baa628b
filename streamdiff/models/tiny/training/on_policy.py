"""Pasts that the model made itself: streams that the network in training plays on, and what should have come next.

A stream that goes on for long sees nothing but its own chunks, whose small faults add up: a star that crosses the edge
of the picture loses an arm, and is copied without it ever after. So the network plays streams of its own while it is
trained; where its last chunk shows the shape, the world says how the next one must look, whole again. This is DAgger
(Ross, Gordon, Bagnell 2011): the teacher answers on the states that the pupil comes to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.autoencoder.taehv import TAEHV, Memory
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training import loop
from streamdiff.models.tiny.training.autoencoder import encode_groups
from streamdiff.models.tiny.training.batches import CHUNK, Starts, Windows, render_windows

FRAMES = CHUNK * world.FRAMES_PER_LATENT
PAST = 2
"""Chunks that a new one sees, as in a stream's `clean` window."""
FRESH = 1 / 80
"""Share of the steps after which a stream begins anew."""
LOST = 0.3
"""A shape of which less than this share is to be seen is gone, and begins where streams begin."""

Flow = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Past `[B, PAST, C, CHUNK, h, w]`, noisy chunk `[B, C, CHUNK, h, w]`, its sigma `[B]`, and scenes `[B, 4]`, or the
ids `[B, tokens]` of their sentences, to the chunk's flow."""


class OwnPasts:
    """`streams` streams, which take turns."""

    def __init__(
        self, autoencoder: TAEHV, mean: Tensor, std: Tensor, starts: Starts, streams: int, generator: torch.Generator
    ) -> None:
        self.autoencoder, self.starts = autoencoder, starts
        self.mean, self.std = mean.view(1, 1, -1, 1, 1), std.view(1, 1, -1, 1, 1)
        rows = torch.randint(len(starts.scenes), (streams,), generator=generator).to(starts.scenes.device)
        self.scenes = starts.scenes[rows, 0]
        self.latents = self._truth(self.scenes, torch.full_like(self.scenes[:, :2], world.SIZE // 2), PAST)[0]
        self._next = 0

    @torch.no_grad()  # not inference mode: what it makes is trained on
    def turn(self, count: int, flow: Flow, levels: tuple[float, ...], generator: torch.Generator) -> Windows:
        """Extend the next `count` streams by a chunk that the network makes, and return training windows for it.

        Returns:
            windows of PAST chunks that the network made and the one that should follow. Mutates: self.
        """
        rows = (self._next + torch.arange(count)) % len(self.scenes)
        self._next = (self._next + count) % len(self.scenes)
        rows = rows.to(self.scenes.device)
        past, scenes = self.latents[rows], self.scenes[rows]
        windows = self._windows(past, scenes)
        self.latents[rows] = torch.cat([past[:, 1:], self._draw(past, scenes, flow, levels, generator)[:, None]], 1)
        self._begin_anew(rows[torch.rand(count, generator=generator).to(rows.device) < FRESH], generator)
        return windows

    def _begin_anew(self, rows: Tensor, generator: torch.Generator) -> None:
        if len(rows):
            drawn = torch.randint(len(self.starts.scenes), (len(rows),), generator=generator).to(rows.device)
            self.scenes[rows] = self.starts.scenes[drawn, 0]
            centre = torch.full_like(self.scenes[rows, :2], world.SIZE // 2)
            self.latents[rows] = self._truth(self.scenes[rows], centre, PAST)[0]

    def _draw(
        self, past: Tensor, scenes: Tensor, flow: Flow, levels: tuple[float, ...], generator: torch.Generator
    ) -> Tensor:
        """The network's next chunk `[B, C, CHUNK, h, w]`."""
        chunk = torch.zeros_like(past[:, 0])
        for level in levels:
            sigma = torch.full((len(past),), level, device=past.device)
            noise = loop.noise_like(chunk, generator)
            noisy = sampling.add_noise(chunk, noise, sigma.view(-1, 1, 1, 1, 1))
            chunk = sampling.clean_from_flow(noisy, flow(past, noisy, sigma, scenes), level)
        return chunk

    @torch.no_grad()
    def _truth(self, scenes: Tensor, origin: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
        """Latents `[B, chunks, C, CHUNK, h, w]` and places `[B, chunks, CHUNK, 2]` of shapes that start at `origin`."""
        latents, places = [], []
        for some, start in zip(scenes.split(8), origin.split(8), strict=True):
            frames, place = render_windows(some[:, None].expand(-1, chunks, -1), start)
            latents.append((encode_groups(self.autoencoder, frames) - self.mean) / self.std)
            places.append(place)
        made = torch.cat(latents).unflatten(1, (chunks, CHUNK)).transpose(2, 3)
        return made, torch.cat(places).unflatten(1, (chunks, CHUNK))

    def _windows(self, past: Tensor, scenes: Tensor) -> Windows:
        last, seen = self.locate(past[:, -1], scenes)
        step = world.velocities(str(scenes.device))[scenes[:, 2]]
        gone = (seen < LOST)[:, None]
        origin = torch.where(gone, torch.full_like(last, world.SIZE // 2), last + step)
        latents, place = self._truth(scenes, origin.remainder(world.SIZE), 1)
        start = torch.zeros(len(past), dtype=torch.bool, device=past.device)
        return Windows(
            torch.cat([past, latents], 1),
            scenes[:, None].expand(-1, PAST + 1, -1),
            start,
            torch.cat([place - step[:, None, None] * FRAMES * back for back in range(PAST, -1, -1)], 1),
        )

    def locate(self, chunk: Tensor, scenes: Tensor) -> tuple[Tensor, Tensor]:
        """Where the shapes of `scenes` `[B, 4]` are in the last frame of `chunk` `[B, C, CHUNK, h, w]`.

        Returns:
            int64 `[B, 2]` (y, x) in pixels, and how much of the shape is there, 0 to 1, float32 `[B]`.
        """
        decoded = [self._last_frames(each) for each in chunk.split(1)]
        frames = torch.cat(decoded)  # [B, 4, 3, SIZE, SIZE]
        look = world.palette(str(chunk.device))
        bare = look.backgrounds[scenes[:, 3]]
        differs = (frames - bare[:, None]).abs().sum(2).clamp(max=0.5)
        alpha = look.alpha[scenes[:, 1]]
        shape = torch.fft.rfft2((alpha - alpha.mean((1, 2), keepdim=True)).roll((-(world.SIZE // 2),) * 2, (1, 2)))
        step = world.velocities(str(chunk.device))[scenes[:, 2]]
        score = torch.zeros_like(differs[:, 0])
        for age in range(differs.shape[1]):  # frames before the last one, moved to where the shape is in the last one
            moved = [
                frame.roll((int(y) * age, int(x) * age), (0, 1))
                for frame, (y, x) in zip(differs[:, -1 - age], step.tolist(), strict=True)
            ]
            score += torch.fft.irfft2(torch.fft.rfft2(torch.stack(moved)) * shape.conj(), s=differs.shape[-2:])
        best = score.flatten(1).argmax(1)
        place = torch.stack([best // world.SIZE, best % world.SIZE], 1)
        color, kind, background = scenes[:, 0], scenes[:, 1], scenes[:, 3]
        whole = (world.render(color, kind, background, place[:, 0], place[:, 1]) - bare).abs().sum(1).clamp(max=0.5)
        seen = torch.minimum(whole, differs[:, -1]).sum((1, 2)) / whole.sum((1, 2))
        return place, seen

    def _last_frames(self, chunk: Tensor) -> Tensor:
        latents = chunk[:, :, -2:].transpose(1, 2) * self.std + self.mean
        return self.autoencoder.decode(latents, Memory())[:, -world.FRAMES_PER_LATENT :]
