"""Says from pixels alone which things a chunk of the embedded model's world shows, and how they move.

The scenery is known (`scenery_judge`). A thing is found in a few frames by comparing every shape, size and angle at
every place with what the scenery leaves unexplained (least squares by FFT); then every way to move is tried over all
frames together. The thing is drawn onto the scenery, and the next one is looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.models.tiny.scene import MOTIONS, SHAPES, SIZES, SPEEDS
from training.world import shapes
from training.world.render import cast_shadow
from training.world.tracks import ANGLES, BOUNDS, PARTS, SIZE, SPIN, STRIDE, pixels, steps

NONE = -1
COLOR_TOLERANCE = 0.34
"""Largest RGB distance to a color's name; the nearest two colors are 0.34 apart."""
FIT_TOLERANCE = 0.6
"""A thing is there when it explains at least this share of what the scenery leaves unexplained where it is."""
LEAST = 1.2
"""And at least so much squared error, per quarter-size picture."""
LOOKS = 4
"""Frames in which things are looked for from nothing."""
QUARTER, HALF = 4, 2
EXPLAINED = 0.12
"""A pixel of a thing that is as near as this to how it was drawn may hide another thing."""
VISIBLE = 0.25
"""A thing is there when at least this share of it may be seen."""
GROUPS = 3
"""How many kinds of finds are followed up before it is said that there is nothing."""
TURNS = {"circle": range(0, 48, 6), "square": range(0, 24, 4), "triangle": range(0, 32, 4), "star": range(0, 19, 4)}
"""Angles at which shapes are looked for: a turn is ANGLES, and these shapes look alike long before one."""
SPREAD = 3
"""How many half-size pixels each way the place of a thing that does not move is refined."""


@dataclass(frozen=True)
class Seen:
    """One thing: rows of the world's tables (or `NONE`), where it is in the first frame, (y, x) in pixels, and the
    share of what is unexplained there that it explains."""

    color: int
    shape: int
    motion: int
    size: int
    speed: int
    place: tuple[int, int]
    fit: float

    def row(self) -> list[int]:
        """In the order of `scene.THING_TABLES`."""
        return [self.color, self.shape, self.motion, self.size, self.speed]


@dataclass(frozen=True)
class _Kind:
    shape: int
    size: int
    angle: int


def _kinds() -> list[_Kind]:
    return [
        _Kind(shape, size, angle)
        for shape, name in enumerate(SHAPES)
        for size in range(len(SIZES))
        for angle in TURNS.get(name, range(0, ANGLES, 4))
    ]


def _drawn(shape: int, size: int, angles: Tensor, light: Tensor) -> tuple[Tensor, Tensor]:
    """Alpha and alpha times lit shading `[A, s, s]` of a thing under `light` `[4]`, at full size."""
    alpha, shading, y, x = shapes.stencil(SHAPES[shape], SIZES[size], angles)
    towards = light @ shapes.TOWARDS
    lit = shading * (0.88 + 0.16 * (y * towards[0] + x * towards[1]))
    return alpha, alpha * lit


def _canvas(maps: Tensor, scale: int) -> Tensor:
    """Maps `[A, s, s]` around the corner of a picture of SIZE / scale, as the transforms want them."""
    half, middle = maps.shape[-1] // 2, SIZE // 2
    whole = torch.zeros(len(maps), SIZE, SIZE)
    whole[:, middle - half : middle + half + 1, middle - half : middle + half + 1] = maps
    return F.avg_pool2d(whole, scale).roll((-middle // scale,) * 2, (-2, -1))


def _spectrum(maps: Tensor) -> Tensor:
    found: Tensor = torch.fft.rfft2(maps).conj()
    return found


@dataclass(frozen=True)
class _Templates:
    """Spectra `[K, h, h / 2 + 1]`, conjugated, of K kinds of things: cover, its square, light, their product, and the
    light's square."""

    alpha: Tensor
    square: Tensor
    light: Tensor
    both: Tensor
    energy: Tensor


def _templates_of(alpha: Tensor, light: Tensor) -> _Templates:
    return _Templates(
        _spectrum(alpha),
        _spectrum(alpha.square()),
        _spectrum(light),
        _spectrum(alpha * light),
        _spectrum(light.square()),
    )


@cache
def _album(hour: int) -> _Templates:
    """All kinds at quarter size, under the light of one hour."""
    small = []
    for kind in _kinds():
        drawn = _drawn(kind.shape, kind.size, torch.tensor([kind.angle]), torch.eye(4)[hour])
        small.append(_canvas(torch.cat(drawn), QUARTER))
    alpha, light = torch.stack(small, 1)
    return _templates_of(alpha, light)


def _back(spectrum: Tensor) -> Tensor:
    made: Tensor = torch.fft.irfft2(spectrum)
    return made


def _look(view: _View, index: int, known: _Templates) -> tuple[Tensor, Tensor]:
    """Squared error `[K, h, h]` less that without it, and the best RGB `[3, K, h, h]`, of every kind everywhere."""
    ground, left, counts = view.grounds[index], view.left[index], view.counts[index, 0]
    mixed = torch.fft.rfft2((left * ground).sum(0)) * known.alpha
    squares = torch.fft.rfft2((counts * ground.square()).sum(0)) * known.square
    pull = _back(torch.fft.rfft2(left)[:, None] * known.light + torch.fft.rfft2(counts * ground)[:, None] * known.both)
    energy = _back(torch.fft.rfft2(counts) * known.energy).clamp(min=1.0)
    rgb = (pull / energy).clamp_(0, 1.1)
    error = _back(2 * mixed + squares) + (rgb * (rgb * energy - 2 * pull)).sum(0)
    return error, rgb


class _View:
    """Frames and grounds `[T, 3, h, h]` at a scale, what is left between them where it counts, and whether it counts,
    `[T, 1, h, h]`."""

    def __init__(self, frames: Tensor, grounds: Tensor, counts: Tensor, scale: int) -> None:
        self.frames, self.grounds = F.avg_pool2d(frames, scale), F.avg_pool2d(grounds, scale)
        self.counts = F.avg_pool2d(counts, scale)
        self.left = (self.frames - self.grounds) * self.counts


@dataclass(frozen=True)
class _Find:
    kind: _Kind
    rgb: Tensor
    gain: float
    frame: int
    place: tuple[int, int]


def _find(view: _View, hours: Tensor) -> list[_Find]:
    """In a few frames each the kind that explains most."""
    kinds, found = _kinds(), []
    for index in torch.linspace(0, len(hours) - 1, LOOKS).round().long().tolist():
        error, rgb = _look(view, index, _album(int(hours[index])))
        best = int(error.argmin())
        side = error.shape[-1]
        kind, rest = divmod(best, side * side)
        y, x = divmod(rest, side)
        place = (y * QUARTER, x * QUARTER)
        found.append(_Find(kinds[kind], rgb[:, kind, y, x], -float(error.flatten()[best]), index, place))
    return found


def _agree(one: _Find, other: _Find) -> bool:
    alike = (one.kind.shape, one.kind.size) == (other.kind.shape, other.kind.size)
    return alike and float((one.rgb - other.rgb).norm()) < 0.35


def _groups(found: list[_Find]) -> list[list[_Find]]:
    """Finds of the same thing, those that explain most over all looks first, in each the best find first."""
    groups: list[list[_Find]] = []
    for find in sorted(found, key=lambda find: -find.gain):
        if not any(_agree(group[0], find) for group in groups):
            groups.append([other for other in sorted(found, key=lambda f: -f.gain) if _agree(find, other)])
    return sorted(groups, key=lambda group: -sum(find.gain for find in group))


@dataclass(frozen=True)
class _Path:
    """How a thing goes: `places` `[T, 2]` (y, x) in half-size pixels, `angles` `[T]`, and what error it leaves."""

    error: float
    motion: int
    speed: int
    places: Tensor
    angles: Tensor


class _Chunk(_View):
    """What is known of one chunk at half size, and its light `[4]`."""

    def __init__(self, frames: Tensor, grounds: Tensor, counts: Tensor, light: Tensor) -> None:
        super().__init__(frames, grounds, counts, HALF)
        self.light = light.mean(0)
        self.side = self.frames.shape[-1]
        self.time = torch.arange(len(frames))
        self.mixed = (self.left * self.grounds).sum(1)
        self.squares = (self.counts * self.grounds.square()).sum(1)

    def errors(self, find: _Find) -> Tensor:
        """Squared error `[T, h, h]`, less that without it, of the upright thing everywhere."""
        alpha, light = _drawn(find.kind.shape, find.kind.size, torch.tensor([0]), self.light)
        known = _templates_of(_canvas(alpha, HALF), _canvas(light, HALF))
        rgb = find.rgb.view(3, 1, 1)
        mixed = torch.fft.rfft2(self.mixed) * known.alpha
        squares = torch.fft.rfft2(self.squares) * known.square
        weighted = torch.fft.rfft2((self.left * rgb).sum(1)) * known.light
        under = torch.fft.rfft2((self.counts * self.grounds * rgb).sum(1)) * known.both
        energy = torch.fft.rfft2(self.counts[:, 0]) * known.energy
        return _back(2 * mixed + squares - 2 * (weighted + under) + rgb.square().sum() * energy)

    def best_path(self, find: _Find) -> _Path:
        """The way to move that explains most."""
        maps = self.errors(find)
        return min([*self._straight(maps), *self._bounces(maps), *self._turns(find)], key=lambda path: path.error)

    def _straight(self, maps: Tensor) -> list[_Path]:
        found = []
        ways = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
        for name, (dy, dx) in ways.items():
            for speed, stride in enumerate(STRIDE):
                moves = pixels(self.time[:, None] * torch.tensor([dy, dx]) * steps(stride) // HALF)
                total = torch.stack(
                    [m.roll((-y, -x), (0, 1)) for m, (y, x) in zip(maps, moves.tolist(), strict=True)]
                ).sum(0)
                best = int(total.argmin())
                start = torch.tensor(divmod(best, self.side))
                places = (start + moves).remainder(self.side)
                found.append(_Path(float(total.min()), MOTIONS.index(name), speed, places, moves[:, 0] * 0))
        return found

    def _bounces(self, maps: Tensor) -> list[_Path]:
        found = []
        bounds = [(low // HALF, high // HALF) for low, high in BOUNDS]
        for speed, stride in enumerate(STRIDE):
            for way_y in (-1, 1):
                for way_x in (-1, 1):
                    paths = [
                        _bounce(torch.arange(self.side), way, steps(stride) // HALF, bound, len(maps))
                        for way, bound in zip((way_y, way_x), bounds, strict=True)
                    ]
                    total = sum(m[y][:, x] for m, y, x in zip(maps, paths[0], paths[1], strict=True))
                    assert isinstance(total, Tensor)
                    y, x = divmod(int(total.argmin()), self.side)
                    places = torch.stack([paths[0][:, y], paths[1][:, x]], 1)
                    motion = MOTIONS.index("bouncing")
                    found.append(_Path(float(total.min()), motion, speed, places, self.time * 0))
        return found

    def _turns(self, find: _Find) -> list[_Path]:
        """Standing still or spinning: all angles, near where the thing was found."""
        angles = torch.arange(ANGLES)
        alpha, light = (
            F.avg_pool2d(F.pad(maps[:, None], (0, 1, 0, 1)), HALF)[:, 0]
            for maps in _drawn(find.kind.shape, find.kind.size, angles, self.light)
        )
        side, reach = alpha.shape[-1], 2 * SPREAD + 1
        corner = torch.tensor(find.place) // HALF - shapes.HALF[SIZES[find.kind.size]] // HALF - SPREAD
        span = torch.arange(side + reach - 1)
        rows, cols = (corner[0] + span).remainder(self.side), (corner[1] + span).remainder(self.side)
        rgb = find.rgb.view(3, 1, 1)

        def windows(maps: Tensor) -> Tensor:
            cut = maps[:, rows][:, :, cols].unfold(1, side, 1).unfold(2, side, 1)
            return cut.reshape(len(maps) * reach * reach, side * side)

        def match(maps: Tensor, templates: Tensor) -> Tensor:
            return windows(maps) @ templates.flatten(1).T

        under = (self.counts * self.grounds * rgb).sum(1)
        error = 2 * match(self.mixed, alpha) + match(self.squares, alpha.square())
        error -= 2 * match((self.left * rgb).sum(1), light) + 2 * match(under, alpha * light)
        error += rgb.square().sum() * match(self.counts[:, 0], light.square())
        table = error.view(len(self.frames), reach * reach, ANGLES)
        found = []
        for rank in range(-1, len(SPEEDS)):
            turned = (angles[None] + self.time[:, None] * (0, *SPIN)[rank + 1]).remainder(ANGLES)
            total = table.gather(2, turned[:, None].expand(-1, reach * reach, -1)).sum(0)
            total = total if rank >= 0 else total[:, :1]
            where, begin = divmod(int(total.argmin()), total.shape[1])
            dy, dx = divmod(where, reach)
            place = (torch.tensor(find.place) // HALF + torch.tensor([dy, dx]) - SPREAD).remainder(self.side)
            motion = MOTIONS.index("still" if rank < 0 else "spinning")
            places = place.expand(len(self.frames), 2)
            found.append(_Path(float(total.min()), motion, rank, places, turned[:, begin]))
        return found


def _bounce(start: Tensor, way: int, step: int, bound: tuple[int, int], length: int) -> Tensor:
    """Where things that bounce are, `[length, len(start)]`, as `tracks.Streams` moves them; `step` is in `PARTS`."""
    low, high = (PARTS * each for each in bound)
    place, ways, found = start * PARTS, torch.full_like(start, way), []
    for frame in range(length):
        if frame:
            ways = torch.where(place >= high, -1, torch.where(place <= low, 1, ways))
            ahead = place + ways * step
            over, under = (ways > 0) & (ahead > high), (ways < 0) & (ahead < low)
            place = torch.where(over, 2 * high - ahead, torch.where(under, 2 * low - ahead, ahead))
            ways = torch.where(over, -1, torch.where(under, 1, ways))
        found.append(pixels(place).remainder(SIZE // HALF))
    return torch.stack(found)


def _paint(grounds: Tensor, find: _Find, path: _Path, light: Tensor) -> tuple[Tensor, Tensor]:
    """The grounds `[T, 3, SIZE, SIZE]` with the thing and its shadow on them, and its alpha `[T, 1, SIZE, SIZE]`."""
    alpha, lit = _drawn(find.kind.shape, find.kind.size, path.angles, light.mean(0))
    half, middle = alpha.shape[-1] // 2, SIZE // 2
    whole = torch.zeros(len(grounds), 2, SIZE, SIZE)
    inner = slice(middle - half, middle + half + 1)
    whole[:, 0, inner, inner], whole[:, 1, inner, inner] = alpha, lit
    moved = torch.stack(
        [
            w.roll((y * HALF - middle, x * HALF - middle), (1, 2))
            for w, (y, x) in zip(whole, path.places.tolist(), strict=True)
        ]
    )
    cover, body = moved[:, :1], moved[:, 1:]
    grounds = grounds.clone()
    for ground, place, shadow in zip(grounds, path.places.tolist(), (light @ shapes.SHADOW).tolist(), strict=True):
        cast_shadow(ground, place[1] * HALF, shapes.RADIUS[SIZES[find.kind.size]], shadow)
    return grounds * (1 - cover) + find.rgb.view(1, 3, 1, 1) * body, cover


def _color(rgb: Tensor, light: Tensor) -> int:
    table = torch.tensor(list(shapes.COLORS.values()))
    distance = (rgb / (light.mean(0) @ shapes.TINT) - table).norm(dim=1)
    return int(distance.argmin()) if float(distance.min()) <= COLOR_TOLERANCE else NONE


def see_things(frames: Tensor, grounds: Tensor, counts: Tensor, light: Tensor, most: int = 2) -> list[Seen]:
    """The things in one chunk `[T, 3, SIZE, SIZE]` over known scenery `grounds`, of the same shape, under light
    `[T, 4]`; `counts` `[T, 1, SIZE, SIZE]` says how much every pixel is to be trusted."""
    seen: list[Seen] = []
    while len(seen) < most:
        groups = _groups(_find(_View(frames, grounds, counts, QUARTER), light.argmax(1)))
        chunk = _Chunk(frames, grounds, counts, light)
        for group in groups[:GROUPS]:
            if sum(find.gain for find in group) / LOOKS < LEAST:
                return seen
            path, find = min(((chunk.best_path(find), find) for find in group[:2]), key=lambda pair: pair[0].error)
            painted, cover = _paint(grounds, find, path, light)
            asked = cover * counts
            before = ((frames - grounds).square() * asked).sum()
            fit = 1 - float(((frames - painted).square() * asked).sum() / before.clamp(min=1e-6))
            if fit >= FIT_TOLERANCE and float(asked.sum() / cover.sum()) >= VISIBLE:
                break
        else:
            return seen
        place = (int(path.places[0, 0]) * HALF, int(path.places[0, 1]) * HALF)
        seen.append(Seen(_color(find.rgb, light), find.kind.shape, path.motion, find.kind.size, path.speed, place, fit))
        # What looks as this thing does may hide the next one; elsewhere on it, something is in front of it.
        explained = (frames - painted).abs().amax(1, keepdim=True) < EXPLAINED
        counts = counts * (1 - (explained & (cover > 0.5)).float())
        grounds = painted
    return seen
