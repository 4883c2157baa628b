"""Says from pixels alone where and when a chunk of the embedded model's world plays: place, hour, weather, camera.

Analysis by synthesis: small pictures of every place, hour and scroll are compared with the first and the last frame,
things and all; the best one is refined, then the weather's patterns are looked for in what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.models.tiny.scene import CAMERAS, HOURS, PLACES, WEATHERS
from training.scene_rows import COLUMN, FIELDS
from training.world import weather
from training.world.render import render
from training.world.tracks import CHUNK_FRAMES, FALL, PAN, QUARTER, SCROLL, Track, shares_of_light

NONE = -1
"""A verdict "nothing the world knows"."""
COARSE = 16
"""Pixels averaged into one for the first comparison."""
SCROLL_STEP = 16
FINE_STEP = 2
"""Pixels to which the scroll is refined."""
PHASES = 16
FAR = 0.12
"""Differences count up to here, so things in front of the scenery, however bright, cost little."""
TOLERANCE = 0.065
"""Mean counted difference up to which a picture still is that scenery."""
CANDIDATES = 6
HOUR_TOLERANCE = 0.3
"""How far, in quarters, the light may be from an hour."""
SEEN = 0.3
"""Rain, snow and wind are there when at least this share of their pattern is."""


@dataclass(frozen=True)
class Setting:
    """Rows of the world's tables, or `NONE`; `track` draws scenery and weather of all T frames."""

    place: int
    hour: int
    weather: int
    camera: int
    track: Track


def scenery_track(place: int, kind: int, scroll: Tensor, phase: Tensor, fall: Tensor) -> Track:
    """A flat track without things: one frame per entry of scroll, phase and fall `[T]`."""
    count = len(scroll)
    scenes = torch.zeros(count, len(FIELDS), dtype=torch.int64)
    scenes[:, COLUMN["place"]], scenes[:, COLUMN["weather"]] = place, kind
    return Track(
        scenes=scenes,
        place=torch.zeros(count, 2, 2, dtype=torch.int64),
        angle=torch.zeros(count, 2, dtype=torch.int64),
        scroll=scroll.remainder(SCROLL),
        light=shares_of_light(phase.remainder(4)),
        fall=fall,
    )


@cache
def _album() -> Tensor:
    """Small pictures `[places * PHASES * scrolls, 3 * c * c]` in that order, in clear weather."""
    scrolls = torch.arange(0, SCROLL, SCROLL_STEP)
    pages = []
    for place in range(len(PLACES)):
        for phase in range(PHASES):
            track = scenery_track(place, 0, scrolls, torch.full((len(scrolls),), phase * 4 / PHASES), scrolls * 0)
            pages.append(F.avg_pool2d(render(track, things=False).frames, COARSE).flatten(1))
    return torch.cat(pages)


def _untinted(frames: Tensor, kind: str) -> Tensor:
    factor, addend = weather.TINTS[kind]
    return (frames - addend) / factor


def _distance(frame: Tensor, pictures: Tensor) -> Tensor:
    """Mean counted difference of a frame `[3, h, w]` to pictures `[N, 3, h, w]`."""
    return (pictures - frame).abs().clamp(max=FAR).mean((1, 2, 3))


@dataclass(frozen=True)
class _Guess:
    place: int
    kind: int  # row of WEATHERS; clear stands for wind as well
    scroll: int
    phase: float
    distance: float


def _coarse(frame: Tensor) -> list[_Guess]:
    """The likeliest sceneries of one frame `[3, SIZE, SIZE]`, best first."""
    small = F.avg_pool2d(frame[None], COARSE).flatten(1)
    scrolls = SCROLL // SCROLL_STEP
    found = []
    for name in ("clear", "rain", "snow"):
        distance = (_album() - _untinted(small, name)).abs().clamp(max=FAR).mean(1)
        best = distance.topk(CANDIDATES, largest=False)
        for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            place, rest = divmod(index, PHASES * scrolls)
            phase, scroll = divmod(rest, scrolls)
            factor = weather.TINTS[name][0]
            found.append(_Guess(place, WEATHERS.index(name), scroll * SCROLL_STEP, phase * 4 / PHASES, value * factor))
    return sorted(found, key=lambda guess: guess.distance)[: 2 * CANDIDATES]


def _half(track: Track) -> Tensor:
    return F.avg_pool2d(render(track, things=False).frames, 2)


def _refine(frame: Tensor, guess: _Guess) -> _Guess:
    """The best scroll, to a pixel pair, and phase near `guess` for one frame `[3, SIZE, SIZE]`."""
    small = F.avg_pool2d(frame[None], 2)[0]
    scrolls = guess.scroll + torch.arange(-SCROLL_STEP // 2, SCROLL_STEP // 2 + 1, FINE_STEP)
    count = len(scrolls)
    track = scenery_track(guess.place, guess.kind, scrolls, torch.full((count,), guess.phase), scrolls * 0)
    # The pattern of the weather, whose phase is not known yet, is a small part of the picture.
    best = int(scrolls[int(_distance(small, _half(track)).argmin())])
    phase, value = _phase(small, guess, best, guess.phase)
    return _Guess(guess.place, guess.kind, best % SCROLL, phase, value)


def _phase(small: Tensor, guess: _Guess, scroll: int, near: float) -> tuple[float, float]:
    """The light's phase, by least squares between neighbouring hours where the picture is scenery, and the distance."""
    hours = torch.arange(4.0)
    pictures = _half(scenery_track(guess.place, guess.kind, torch.full((4,), scroll), hours, torch.zeros(4).long()))
    found = []
    for begin in {int(near - 0.5) % 4 if near >= 0.5 else 3, int(near) % 4, int(near + 0.5) % 4}:
        a, b = pictures[begin], pictures[(begin + 1) % 4]
        share = float(torch.tensor((near - begin) % 4).clamp(0, 1)) if (near - begin) % 4 <= 1 else 0.5
        for _ in range(4):
            plain = ((torch.lerp(a, b, share) - small).abs().amax(0) < FAR).float()
            change = (b - a) * plain
            share = float((((small - a) * change).sum() / change.square().sum().clamp(min=1e-6)).clamp(0, 1))
        value = float((torch.lerp(a, b, share) - small).abs().clamp(max=FAR).mean())
        found.append((value, (begin + share) % 4))
    value, phase = min(found)
    return phase, value


def _fall_of(frame: Tensor, guess: _Guess, name: str) -> tuple[float, int]:
    """How much of a weather's pattern is in a frame `[3, SIZE, SIZE]`, 0 to about 1, and at which fall it is."""
    kind = WEATHERS.index(name)
    track = scenery_track(guess.place, 0, torch.tensor([guess.scroll]), torch.tensor([guess.phase]), torch.tensor([0]))
    factor, addend = weather.TINTS[name]
    ground = render(track, things=False).frames[0] * factor + addend
    left = frame - ground
    small = F.avg_pool2d(left[None], 2)
    plain = (small.abs().amax(1) < 0.5).float()
    seen = _fine(small * plain).clamp(-0.3, 0.3)
    rgb = weather.color(kind, track.light[0]).view(3, 1, 1)
    strengths = []
    for fall in range(FALL if name == "snow" else 4):
        cover = weather.cover(kind, fall)
        assert cover is not None
        expected = _fine(F.avg_pool2d((cover * (rgb - ground))[None], 2) * plain)
        strengths.append(float((seen * expected).sum() / expected.square().sum().clamp(min=1e-6)))
    best = max(range(len(strengths)), key=strengths.__getitem__)
    return strengths[best], best


def _fine(picture: Tensor) -> Tensor:
    """What is fine in a picture `[1, C, h, w]`: slow differences belong to scenery and things."""
    return picture - F.interpolate(F.avg_pool2d(picture, 8), scale_factor=8, mode="bilinear")


def _weather(frames: Tensor, first: _Guess, last: _Guess) -> tuple[int, int]:
    """Row of the weather, and its fall in the first frame: what the tint tells, if its pattern is there, or else the
    weather whose pattern is."""
    tint = WEATHERS[first.kind] if first.kind else "wind"
    for names in ((tint,), tuple(name for name in WEATHERS[1:] if name != tint)):
        seen = []
        for name in names:
            begin, end = _fall_of(frames[0], first, name), _fall_of(frames[-1], last, name)
            seen.append(((begin[0] + end[0]) / 2, WEATHERS.index(name), begin[1]))
        strength, kind, fall = max(seen)
        if strength >= SEEN:
            return kind, fall
        if not first.kind:
            break  # untinted scenery without wind
    return WEATHERS.index("clear"), 0


def see_setting(frames: Tensor) -> Setting:
    """The setting of one chunk `[T, 3, SIZE, SIZE]`."""
    length = len(frames)
    first = min((_refine(frames[0], g) for g in _distinct(_coarse(frames[0]))), key=lambda guess: guess.distance)
    last = _follow(frames[-1], first, length)
    kind, fall = _weather(frames, first, last)
    if weather.TINTS[WEATHERS[kind]] != weather.TINTS[WEATHERS[first.kind]]:
        # The light had been mistaken for that of another weather.
        first = _refine(frames[0], replace(first, kind=kind))
        last = _follow(frames[-1], first, length)
    moved = (last.scroll - first.scroll + SCROLL // 2) % SCROLL - SCROLL // 2
    panned = PAN * (length - 1) / CHUNK_FRAMES
    side = moved / panned
    camera = NONE
    if abs(side - round(side)) < 0.4 and abs(round(side)) <= 1:
        camera = CAMERAS.index(("left", "still", "right")[round(side) + 1])
    passed = (last.phase - first.phase + 2) % 4 - 2
    hour = _hour(first.phase, passed, length)
    familiar = max(first.distance, last.distance) <= TOLERANCE
    time = torch.arange(length)
    steps = time / (length - 1)
    track = scenery_track(
        first.place,
        kind,
        first.scroll + (steps * moved).round().long(),
        first.phase + steps * passed,
        (fall + time).remainder(FALL),
    )
    if not familiar:
        return Setting(NONE, NONE, NONE, NONE, track)
    return Setting(first.place, hour, kind, camera, track)


def _follow(frame: Tensor, first: _Guess, length: int) -> _Guess:
    """The scenery of the last frame, whichever way the camera went."""
    ends = []
    for side in (-1, 0, 1):
        scroll = (first.scroll + round(side * PAN * (length - 1) / CHUNK_FRAMES)) % SCROLL
        phase = (first.phase + 0.5 * (length - 1) / QUARTER) % 4
        ends.append(_refine(frame, replace(first, scroll=scroll, phase=phase)))
    return min(ends, key=lambda guess: guess.distance)


def _hour(phase: float, passed: float, length: int) -> int:
    if passed > 0.5 * (length - 1) / QUARTER:
        return HOURS.index("passing")
    nearest = round(phase + passed / 2)
    return nearest % 4 if abs(phase + passed / 2 - nearest) <= HOUR_TOLERANCE else NONE


def _distinct(guesses: list[_Guess]) -> list[_Guess]:
    """The best guess of each place and tint, a few more for the best ones."""
    kept: list[_Guess] = []
    for guess in guesses:
        alike = [other for other in kept if (other.place, other.kind) == (guess.place, guess.kind)]
        if len(alike) < 2 and len(kept) < 3:
            kept.append(guess)
    return kept
