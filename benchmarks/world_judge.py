"""Says from pixels alone what a chunk of the procedural world shows: color, shape, motion, background, displacement.

Analysis by synthesis: a picture of the world is `background * (1 - alpha) + rgb * light`, with `alpha` and `light`
known per shape up to a shift on the torus. The background is the nearest known picture; then, for every shape and
position, the least-squares error of the best `rgb` is computed at half resolution by FFT; the best position is refined
to a fraction of a pixel at full resolution. Knows nothing about prompts, latents or models, never sees the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.models.tiny import world

NONE = -1
"""A verdict "nothing the world knows"."""

FAR = 0.15
"""Differences to a background count up to here, so a shape on it, however bright, costs little."""
BACKGROUND_TOLERANCE = 0.08
"""Mean counted difference up to which a picture still is that background (unlike pictures: 0.11 or more)."""
COLOR_TOLERANCE = 0.30
"""Largest RGB distance to a color's name; the nearest two colors are 0.34 apart."""
FIT_TOLERANCE = 0.75
"""A shape is there when it explains at least this share of the difference to the background (a soft blob: 0.6)."""
MOTION_TOLERANCE = 0.7
"""Pixels per frame, in each axis, by which the mean velocity may be off."""

PATCH = 64
BLUR = 1.5
REFINEMENTS = 2
BATCH_CHUNKS = 8


@dataclass(frozen=True)
class Verdict:
    """What N chunks of T frames show. Rows of the world's tables, or `NONE`; int64 `[N]` each.

    position: float32 `[N, T, 2]`, centre of the shape (y, x) in pixels, in [0, SIZE) up to rounding.
    step: float32 `[N, T - 1, 2]`, displacement (y, x) between neighbouring frames, the short way around the torus.
    fit: float32 `[N]`, share of the difference to the background that the shape explains; 1 is perfect.
    rgb: float32 `[N, 3]`, color of the shape with its shading taken off.
    """

    color: Tensor
    shape: Tensor
    motion: Tensor
    background: Tensor
    position: Tensor
    step: Tensor
    fit: Tensor
    rgb: Tensor

    def right(self, scenes: Tensor) -> Tensor:
        """Bool `[N, 4]`: which attributes agree with int64 `[N, 4]` rows in the order of `Scene.indices`."""
        said = torch.stack([self.color, self.shape, self.motion, self.background], 1)
        return said == scenes


@dataclass(frozen=True)
class _Templates:
    """Everything the judge knows of the world. Half resolution: h = SIZE / 2; K shapes, G backgrounds.

    full: backgrounds `[G, 3, SIZE, SIZE]`; half: the same at h. Spectra are conjugated rfft2 `[K, h, h / 2 + 1]`.
    constant `[G, K, h, h]` and lit `[G, 3, K, h, h]` are the parts of the error that do not depend on the picture;
    energy `[K]` is the sum of light squared. alpha, light, core `[K, PATCH, PATCH]` at full resolution, core the
    eroded inside; soft_light `[K, PATCH / 2, PATCH / 2]` is light after `_soft`, whose matrix is blur; soft_slope
    `[K, 2, 2, PATCH / 2, PATCH / 2]` the derivatives (of alpha, of light) along (y, x), softened too.
    """

    full: Tensor
    half: Tensor
    alpha_spectrum: Tensor
    light_spectrum: Tensor
    constant: Tensor
    lit: Tensor
    energy: Tensor
    alpha: Tensor
    light: Tensor
    core: Tensor
    soft_light: Tensor
    soft_slope: Tensor
    blur: Tensor
    palette: Tensor
    velocity: Tensor


def _blur_matrix() -> Tensor:
    axis = torch.arange(PATCH, dtype=torch.float32)
    distance = axis[::2, None] + 0.5 - axis[None]
    # Cut off, for the tail would be denormal numbers, which a CPU multiplies a hundred times slower.
    weight = torch.exp(-(distance**2) / (2 * BLUR**2)) * (distance.abs() < 4 * BLUR)
    matrix: Tensor = (weight / weight.sum(1, keepdim=True)).T.contiguous()
    return matrix


def _soft(maps: Tensor, blur: Tensor) -> Tensor:
    """Blur maps `[..., PATCH, PATCH]` and keep every second pixel each way: `[..., PATCH / 2, PATCH / 2]`."""
    # Two plain products of matrices; a batched product with a broadcast side is many times slower on a CPU.
    across = (maps.reshape(-1, PATCH) @ blur).view(*maps.shape[:-1], -1)
    down: Tensor = (across.mT.reshape(-1, PATCH) @ blur).view(*maps.shape[:-2], PATCH // 2, -1)
    return down.mT


@cache
def _templates() -> _Templates:
    look = world.palette()
    palette = torch.tensor(list(world.COLORS.values()))
    # Sprites are a color times a shading, so the color without dark channels gives the shading of all.
    plainest = int(palette.amin(1).argmax())
    alpha, half = look.alpha, F.avg_pool2d(look.backgrounds, 2)
    light = alpha * (look.sprites[plainest] / palette[plainest].view(3, 1, 1)).mean(1)
    alpha_half, light_half = F.avg_pool2d(alpha, 2), F.avg_pool2d(light, 2)
    # Sprites are drawn around the middle of the picture; the transforms want them around the corner.
    corner = tuple(size // 2 for size in alpha_half.shape[-2:])

    def spectrum(picture: Tensor) -> Tensor:
        found: Tensor = torch.fft.rfft2(picture.roll(corner, (-2, -1))).conj()
        return found

    constant = torch.fft.irfft2(torch.fft.rfft2(half.square().sum(1))[:, None] * spectrum(alpha_half.square()))
    lit = torch.fft.irfft2(torch.fft.rfft2(half)[:, :, None] * spectrum(alpha_half * light_half))
    margin = (world.SIZE - PATCH) // 2
    inner = slice(margin, margin + PATCH)
    small_alpha, small_light = alpha[:, inner, inner], light[:, inner, inner]
    assert torch.allclose(small_alpha.sum(), alpha.sum()), "a shape is larger than the judge's patch"
    stack = torch.stack([small_alpha, small_light], 1)
    slope = torch.stack([(stack.roll(-1, axis) - stack.roll(1, axis)) / 2 for axis in (-2, -1)], 2)
    blur = _blur_matrix()
    core = (-F.max_pool2d(-(small_alpha > 0.99).float()[:, None], 9, stride=1, padding=4)).squeeze(1)
    return _Templates(
        full=look.backgrounds,
        half=half,
        alpha_spectrum=spectrum(alpha_half),
        light_spectrum=spectrum(light_half),
        constant=constant,
        lit=lit,
        energy=light_half.square().sum((-2, -1)),
        alpha=small_alpha,
        light=small_light,
        core=core,
        soft_light=_soft(small_light, blur),
        soft_slope=_soft(slope, blur),
        blur=blur,
        palette=palette,
        velocity=world.velocities().float(),
    )


def wrapped(distance: Tensor) -> Tensor:
    """The short way around the torus, in [-SIZE / 2, SIZE / 2)."""
    return (distance + world.SIZE / 2).remainder(world.SIZE) - world.SIZE / 2


def as_frames(pictures: Tensor) -> Tensor:
    """Float32 `[N, T, 3, H, W]` in [0, 1] from that, or from uint8 `[N, T, H, W, 3]`.

    Raises:
        ValueError: any other layout, or a size that is not the world's.
    """
    frames = pictures.movedim(-1, 2).float() / 255 if pictures.dtype == torch.uint8 else pictures.float()
    if frames.ndim != 5 or frames.shape[2:] != (3, world.SIZE, world.SIZE):
        raise ValueError(
            f"cannot judge pictures of shape {tuple(pictures.shape)} and type {pictures.dtype}: give float "
            f"[N, T, 3, {world.SIZE}, {world.SIZE}] in [0, 1] or uint8 [N, T, {world.SIZE}, {world.SIZE}, 3]"
        )
    return frames.clamp(0, 1)


def _see_background(small: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest background of chunks `[N, T, 3, h, h]`: its row `[N]`, and bool `[N]` whether it is near enough."""
    distance = torch.stack(
        [(small - picture).abs().clamp(max=FAR).mean((1, 2, 3, 4)) for picture in _templates().half], 1
    )
    best = distance.min(1)
    return best.indices, best.values < BACKGROUND_TOLERANCE


def _search(small: Tensor, background: Tensor) -> tuple[Tensor, Tensor]:
    """Try every shape at every position of frames `[B, 3, h, h]` over known backgrounds `[B]`.

    Returns the least squared error of each shape `[B, K]` (less a constant of the frame) and where `[B, K, 2]`, in
    pixels of full resolution.
    """
    known = _templates()
    ground = known.half[background]
    difference = small - ground
    mixed = torch.fft.rfft2((difference * ground).sum(1))[:, None] * known.alpha_spectrum
    lit = torch.fft.irfft2(torch.fft.rfft2(difference)[:, :, None] * known.light_spectrum) + known.lit[background]
    energy = known.energy.view(-1, 1, 1)
    rgb = (lit / energy).clamp_(0, 1.1)
    error = known.constant[background] + 2 * torch.fft.irfft2(mixed) + (rgb * (rgb * energy - 2 * lit)).sum(1)
    width = error.shape[-1]
    best = error.flatten(-2).min(-1)
    place = torch.stack([best.indices // width, best.indices % width], -1)
    return best.values, place.float() * (world.SIZE / width)


@dataclass(frozen=True)
class _Patch:
    """The surroundings of a shape in B frames: picture and ground `[B, 3, PATCH, PATCH]` around `base` `[B, 2]`."""

    picture: Tensor
    ground: Tensor
    base: Tensor


def _cut(frames: Tensor, background: Tensor, position: Tensor) -> _Patch:
    base = position.round().long()
    span = torch.arange(PATCH) - PATCH // 2
    rows = (base[:, 0, None] + span).remainder(world.SIZE)[:, None, :, None]
    cols = (base[:, 1, None] + span).remainder(world.SIZE)[:, None, None, :]
    channel = torch.arange(3).view(1, 3, 1, 1)
    picture = frames[torch.arange(len(frames)).view(-1, 1, 1, 1), channel, rows, cols]
    return _Patch(picture, _templates().full[background.view(-1, 1, 1, 1), channel, rows, cols], base)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def _refine(patch: _Patch, shape: Tensor) -> tuple[Tensor, Tensor]:
    """One Gauss-Newton step on position and color together. Returns position `[B, 2]` and explained share `[B, 2]`.

    Both sides are blurred first, which makes the error smooth over a pixel and indifferent to soft edges and noise.
    The share comes as numerator and denominator, so that chunks can add theirs up.
    """
    known = _templates()
    light, slope = known.soft_light[shape, None], known.soft_slope[shape, :, :, None]
    maps = torch.stack([patch.picture, patch.ground, patch.ground * known.alpha[shape, None]], 1)
    picture, ground, covered = _soft(maps, known.blur).unbind(1)
    empty = picture - ground
    bare = empty + covered
    rgb = (_inner(bare, light) / _inner(light, light)).clamp(0, 1.1)
    residual = bare - rgb * light
    share = torch.stack([residual.square().sum((1, 2, 3)), empty.square().sum((1, 2, 3))], 1)
    down, right = (ground * slope[:, 0, axis] - rgb * slope[:, 1, axis] for axis in (0, 1))
    # A change of color looks a little like a shift; take out of each map what color can explain.
    norm = _inner(light, light)
    residual, down, right = (m - light * _inner(m, light) / norm for m in (residual, down, right))
    jacobian = torch.stack([down, right], 1).flatten(2)
    normal = jacobian @ jacobian.mT + 1e-4 * torch.eye(2)
    move = torch.linalg.solve(normal, jacobian @ residual.flatten(1)[:, :, None]).squeeze(-1)
    return patch.base + move.clamp(-2, 2), share


def _see_color(patch: _Patch, shape: Tensor) -> Tensor:
    """RGB `[B, 3]` of the shape, shading taken off, from its inside alone."""
    light = (_templates().light * _templates().core)[shape, None]
    return ((patch.picture * light).sum((-2, -1)) / light.square().sum((-2, -1))).clamp(0, 1.2)


def _nearest(value: Tensor, table: Tensor, tolerance: float, *, per_axis: bool) -> Tensor:
    """Row of `table` nearest to each value `[N, D]`, or `NONE` beyond the tolerance."""
    distance = torch.cdist(value, table, p=float("inf") if per_axis else 2.0)
    best = distance.min(1)
    return torch.where(best.values <= tolerance, best.indices, NONE)


def _judge_batch(frames: Tensor) -> Verdict:
    chunks, length = frames.shape[:2]
    small = F.avg_pool2d(frames.flatten(0, 1), 2)
    background, familiar = _see_background(small.unflatten(0, (chunks, length)))
    ground = background.repeat_interleave(length)
    cost, place = _search(small, ground)
    shape = cost.view(chunks, length, -1).sum(1).argmin(1)
    kind = shape.repeat_interleave(length)
    position = place[torch.arange(len(place)), kind]
    pictures = frames.flatten(0, 1)
    for _ in range(REFINEMENTS):
        patch = _cut(pictures, ground, position)
        position, share = _refine(patch, kind)
    left, total = share.view(chunks, length, 2).sum(1).unbind(1)
    fit = 1 - left / total.clamp(min=1e-6)
    rgb = _see_color(patch, kind).view(chunks, length, 3).median(1).values
    position = position.view(chunks, length, 2)
    step = wrapped(position[:, 1:] - position[:, :-1])
    seen = familiar & (fit >= FIT_TOLERANCE)
    color = _nearest(rgb, _templates().palette, COLOR_TOLERANCE, per_axis=False)
    motion = _nearest(step.mean(1), _templates().velocity, MOTION_TOLERANCE, per_axis=True)

    def if_(known: Tensor, row: Tensor) -> Tensor:
        return torch.where(known, row, NONE)

    return Verdict(
        color=if_(seen, color),
        shape=if_(seen, shape),
        motion=if_(seen, motion),
        background=if_(familiar, background),
        position=position.remainder(world.SIZE),
        step=step,
        fit=fit,
        rgb=rgb,
    )


@torch.no_grad()
def judge(pictures: Tensor) -> Verdict:
    """What each of N chunks shows; one scene per chunk is assumed, one position per frame.

    Args:
        pictures: float `[N, T, 3, SIZE, SIZE]` in [0, 1] or uint8 `[N, T, SIZE, SIZE, 3]`, T >= 2.

    Raises:
        ValueError: another layout or size.
    """
    if pictures.ndim != 5 or pictures.shape[1] < 2 or not len(pictures):
        raise ValueError(f"cannot judge pictures of shape {tuple(pictures.shape)}: at least one chunk of two frames")
    parts = [_judge_batch(as_frames(part)) for part in pictures.split(BATCH_CHUNKS)]
    return Verdict(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Verdict)})
