"""Pasts that the model made itself: streams that the network in training plays on, and what should have come next.

A stream that goes on for long sees nothing but its own chunks, whose small faults add up: a star that crosses the edge
of the picture loses an arm, and is copied without it ever after. So the network plays streams of its own while it is
trained; where its last chunk shows the shape, the world says how the next one must look, whole again. This is DAgger
(Ross, Gordon, Bagnell 2011): the teacher answers on the states that the pupil comes to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training import loop
from streamdiff.models.tiny.training.batches import (
    FRAMES,
    LatentEncoder,
    Starts,
    Windows,
    WindowsT,
    stream_latents,
)

PAST = 2
"""Chunks that a new one sees, as in a stream's `clean` window."""
FRESH = 1 / 80
"""Share of the steps after which a stream begins anew."""
LOST = 0.3
"""A shape of which less than this share is to be seen is gone, and begins where streams begin."""

Flow = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Past `[B, PAST, C, CHUNK, h, w]`, noisy chunk `[B, C, CHUNK, h, w]`, its sigma `[B]`, and what the network is told of
each stream `[B, ...]`, to the chunk's flow."""


class PlayedStreams(ABC, Generic[WindowsT]):
    """Streams of any world, which take turns: `scenes` `[streams, fields]`, and `latents` of their last chunks
    `[streams, PAST, C, CHUNK, h, w]`."""

    scenes: Tensor
    latents: Tensor
    _next = 0

    @torch.no_grad()  # not inference mode: what it makes is trained on
    def turn(self, count: int, flow: Flow, levels: tuple[float, ...], generator: torch.Generator) -> WindowsT:
        """Extend the next `count` streams by a chunk that the network makes, and return training windows for it.

        Returns:
            windows of PAST chunks that the network made and the one that should follow. Mutates: self.
        """
        rows = ((self._next + torch.arange(count)) % len(self.scenes)).to(self.scenes.device)
        self._next = (self._next + count) % len(self.scenes)
        past = self.latents[rows]
        windows, told = self._go_on(rows, past)
        self.latents[rows] = torch.cat([past[:, 1:], _draw(past, told, flow, levels, generator)[:, None]], 1)
        fresh = rows[torch.rand(count, generator=generator).to(rows.device) < FRESH]
        if len(fresh):
            self._begin_anew(fresh, generator)
        return windows

    @abstractmethod
    def _go_on(self, rows: Tensor, past: Tensor) -> tuple[WindowsT, Tensor]:
        """Windows of the streams of `rows`: `past`, their latents, and what should follow; and what the network is told
        of them. Mutates: self."""

    @abstractmethod
    def _begin_anew(self, rows: Tensor, generator: torch.Generator) -> None:
        """Put new streams in the place of those of `rows`. Mutates: self."""


def _draw(past: Tensor, told: Tensor, flow: Flow, levels: tuple[float, ...], generator: torch.Generator) -> Tensor:
    """The network's next chunk `[B, C, CHUNK, h, w]`."""
    chunk = torch.zeros_like(past[:, 0])
    for level in levels:
        sigma = torch.full((len(past),), level, device=past.device)
        noise = loop.noise_like(chunk, generator)
        noisy = sampling.add_noise(chunk, noise, sigma.view(-1, 1, 1, 1, 1))
        chunk = sampling.clean_from_flow(noisy, flow(past, noisy, sigma, told), level)
    return chunk


class OwnPasts(PlayedStreams[Windows]):
    """`streams` streams of the 128 pixel world."""

    def __init__(self, encode: LatentEncoder, starts: Starts, streams: int, generator: torch.Generator) -> None:
        self.encode, self.starts = encode, starts
        self.scenes = self._drawn(streams, generator)
        self.latents = self._begun(self.scenes)

    def _drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Scenes `[count, 4]` of streams that begin."""
        rows = torch.randint(len(self.starts.scenes), (count,), generator=generator).to(self.starts.scenes.device)
        return self.starts.scenes[rows, 0]

    def _begun(self, scenes: Tensor) -> Tensor:
        """Latents `[B, PAST, C, CHUNK, h, w]` of streams that begin."""
        centre = torch.full_like(scenes[:, :2], world.SIZE // 2)
        return stream_latents(self.encode, scenes, centre, PAST)[0]

    def _begin_anew(self, rows: Tensor, generator: torch.Generator) -> None:
        self.scenes[rows] = self._drawn(len(rows), generator)
        self.latents[rows] = self._begun(self.scenes[rows])

    def _go_on(self, rows: Tensor, past: Tensor) -> tuple[Windows, Tensor]:
        scenes = self.scenes[rows]
        last, seen = self.locate(past[:, -1], scenes)
        step = world.velocities(str(scenes.device))[scenes[:, 2]]
        gone = (seen < LOST)[:, None]
        origin = torch.where(gone, torch.full_like(last, world.SIZE // 2), last + step)
        latents, place = stream_latents(self.encode, scenes, origin.remainder(world.SIZE), 1)
        windows = Windows(
            torch.cat([past, latents], 1),
            scenes[:, None].expand(-1, PAST + 1, -1),
            torch.zeros(len(past), dtype=torch.bool),
            torch.cat([place - step[:, None, None] * FRAMES * back for back in range(PAST, -1, -1)], 1),
        )
        return windows, scenes

    def locate(self, chunk: Tensor, scenes: Tensor) -> tuple[Tensor, Tensor]:
        """Where the shapes of `scenes` `[B, 4]` are in the last frame of `chunk` `[B, C, CHUNK, h, w]`.

        Returns:
            int64 `[B, 2]` (y, x) in pixels, and how much of the shape is there, 0 to 1, float32 `[B]`.
        """
        frames = self.encode.last_frames(chunk, world.FRAMES_PER_LATENT, at_once=1)  # [B, 4, 3, SIZE, SIZE]
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
