"""Draws all frames of a track at once, for a GPU: `render`, as a few operations on whole batches of pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from streamdiff.models.tiny.scene import PLACES, SIZES, WEATHERS
from training.scene_rows import COLUMN
from training.world import shapes, weather
from training.world.painting import scenery
from training.world.render import GROUND, SHADOW_REACH, render, sprites_by_size, there
from training.world.tracks import SIZE, Track


def draw_frames(track: Track, device: torch.device, things: bool = True) -> Tensor:
    """Whole pictures of a flat track, float32 `[N, 3, SIZE, SIZE]` in [0, 1], by what is faster on this device."""
    if device.type == "cpu":
        return render(track, things=things).frames
    return render_batch(track, device, things)


def render_batch(track: Track, device: torch.device, things: bool = True) -> Tensor:
    """The frames that `render` draws of a flat track, `[N, 3, SIZE, SIZE]`; takes 10 MB per frame."""
    with torch.autocast(device.type, enabled=False):
        light = track.light.to(device)
        kinds = track.scenes[:, COLUMN["weather"]]
        tint = torch.tensor([weather.TINTS[name] for name in WEATHERS])[kinds].to(device)[:, :, None, None, None]
        frames = _scenery(track, light) * tint[:, 0] + tint[:, 1]
        if things:
            for thing in (0, 1):
                frames *= _shadows(track, thing, light)
            for thing in (1, 0):  # the first thing is in front
                alpha, rgb = _sprites(track, thing, light)
                frames = torch.lerp(frames, rgb, alpha)
        color, cover = weather.falling(kinds, track.fall, light)
        return torch.lerp(frames, color[:, :, None, None], cover[:, None])


def _scenery(track: Track, light: Tensor) -> Tensor:
    """Sky and the two layers that scroll, `[N, 3, SIZE, SIZE]`."""
    device = light.device
    look = scenery(str(device))
    frames = torch.einsum("nh,hcyx->ncyx", light, look.sky)
    places = track.scenes[:, COLUMN["place"]]
    for place in range(len(PLACES)):
        rows = (places == place).nonzero()[:, 0]
        if not len(rows):
            continue
        scroll, rows = track.scroll[rows], rows.to(device)
        for layer, offset in ((0, scroll // 2), (1, scroll)):
            top = look.top[place][layer]
            columns = (offset.remainder(SIZE)[:, None] + torch.arange(SIZE)).to(device)
            bare = look.bare[place, layer, top:][:, columns].transpose(0, 1)[:, None]
            ink = torch.einsum("nh,hcyx->ncyx", light[rows], look.ink[place, layer, :, :, top:])
            ink = ink.gather(3, columns[:, None, None].expand(-1, 3, ink.shape[2], -1))
            frames[rows, :, top:] = frames[rows, :, top:] * bare + ink
    return frames


def _shadows(track: Track, thing: int, light: Tensor) -> Tensor:
    """How bright the ground is under the shadow of a thing, `[N, 1, SIZE, SIZE]`, 1 where there is none."""
    device = light.device
    sizes = track.scenes[:, COLUMN[("", "second_")[thing] + "size"]]
    scale = torch.tensor([shapes.RADIUS[name] / shapes.RADIUS["large"] for name in SIZES])[sizes].to(device)
    beside, length, dark = (light @ shapes.SHADOW.to(device)).unbind(1)
    axis = torch.arange(SIZE, device=device)
    center = track.place[:, thing, 1].to(device) + beside.round()
    x = (axis - center[:, None] + SIZE / 2).remainder(SIZE) - SIZE / 2
    y = (axis - GROUND + SIZE // 2).remainder(SIZE) - SIZE // 2
    x, y = x / (SHADOW_REACH[1] * scale * length)[:, None], y / (SHADOW_REACH[0] * scale)[:, None]
    away = (y.square()[:, :, None] + x.square()[:, None]).sqrt()
    dark = torch.where(there(track, thing).to(device), dark, 0.0)
    return (1 - dark[:, None, None] * ((1.25 - away) / 0.5).clamp(0, 1))[:, None]


def _sprites(track: Track, thing: int, light: Tensor) -> tuple[Tensor, Tensor]:
    """Cover `[N, 1, SIZE, SIZE]` and colors `[N, 3, SIZE, SIZE]` of the first or the second thing of every frame."""
    device = light.device
    canvas = torch.zeros(len(track.scroll), SIZE, SIZE, 4, device=device)
    for name, rows, alpha, rgb in sprites_by_size(track, thing, light):
        place, rows = track.place[rows, thing].to(device), rows.to(device)
        span = torch.arange(-shapes.HALF[name], shapes.HALF[name] + 1, device=device)
        y, x = ((place[:, axis, None] + span).remainder(SIZE) for axis in (0, 1))
        drawn = torch.cat([alpha, rgb], 1).permute(0, 2, 3, 1)
        canvas[rows[:, None, None], y[:, :, None], x[:, None, :]] = drawn
    canvas = canvas.permute(0, 3, 1, 2)
    return canvas[:, :1], canvas[:, 1:]
