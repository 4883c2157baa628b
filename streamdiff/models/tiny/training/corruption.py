"""Corrupted past chunks for training the transformer: shapes that are faded, cut off, shrunk or missing.

A stream attends to what the model itself has made. A small error in one chunk is the past of the next, and a model that
was only trained on perfect pasts copies it, until after minutes a star is a dot. Trained on corrupted pasts with intact
targets, it learns to draw the shape anew from the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamdiff.models.tiny import world
from streamdiff.models.tiny.training.batches import CHUNK, LatentEncoder, Windows

SHARE = 0.3
"""Share of the windows whose past is corrupted."""


def empty_latents(encode: LatentEncoder) -> Tensor:
    """Latents `[backgrounds, C, h, w]` of the backgrounds without any shape."""
    pictures = world.empty(torch.arange(len(world.BACKGROUNDS), device=encode.device))
    return encode(pictures[:, None].expand(-1, world.FRAMES_PER_LATENT, -1, -1, -1))[:, 0].clone()


def corrupt_shapes(windows: Windows, empty: Tensor, generator: torch.Generator) -> Tensor:
    """The latents of `windows`, with the shapes of a share of the windows corrupted, alike in all their chunks.

    A corrupted shape is faded as a whole, cut off on one side, or left only around its centre; `empty`
    (`empty_latents`) takes its place.
    """
    batch, device = len(windows.latents), windows.latents.device

    dy, dx = windows.from_centers()
    angle, edge, radius, fade = (
        windows.drawn(low, high, generator) for low, high in ((0, 2 * torch.pi), (-8, 14), (4, 20), (0.2, 0.9))
    )
    cut = (dy[..., None] * angle.sin() + dx[..., None, :] * angle.cos() > edge).float()
    shrunk = (dy[..., None].square() + dx[..., None, :].square() > radius**2).float()
    kind = torch.randint(3, (batch,), generator=generator).to(device).view(-1, 1, 1, 1, 1)
    share = torch.where(kind == 0, fade, torch.where(kind == 1, cut, shrunk))
    share = share * (windows.drawn(0, 1, generator) < SHARE)
    background = empty[windows.scenes[..., 3]].unsqueeze(3)
    return torch.lerp(windows.latents, background.expand_as(windows.latents), share.unsqueeze(2))


def after_nothing(starts: Windows, empty: Tensor, past: int) -> Windows:
    """Windows of `past` + 1 chunks from windows of one: the bare background, then the stream's first chunk. Where a
    shape has gone altogether nothing tells its place, so it begins again where streams begin."""
    bare = empty[starts.scenes[:, :, 3]].unsqueeze(3).expand(-1, past, -1, CHUNK, -1, -1)
    return Windows(
        torch.cat([bare, starts.latents], 1),
        starts.scenes.repeat(1, past + 1, 1),
        torch.zeros_like(starts.start),
        starts.place.repeat(1, past + 1, 1, 1),
    )
