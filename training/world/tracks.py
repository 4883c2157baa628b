"""How a stream of the world goes on: places, angles, the camera, light and weather of every frame.

The next chunk follows from the last one and the scene alone. In a chunk (twelve frames) things move 16, 32 or 64 pixels
and the camera 32: half a token of the transformer, one, or two. So a chunk is the one before, moved by whole latent
cells, and begins with everything on a coarse lattice: few pictures to be learnt, and small errors have a place to be
put right. Things wrap around at the picture's borders, except those that bounce. Integers and a few floats on the CPU;
knows nothing about how it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from streamdiff.core import Control
from streamdiff.models.tiny.scene import CAMERAS, HOURS, MOTIONS, WEATHERS
from training.scene_rows import COLUMN

SIZE = 256
FRAMES_PER_LATENT = 4
CHUNK_LATENTS = 3
CHUNK_FRAMES = CHUNK_LATENTS * FRAMES_PER_LATENT
LATTICE = 16
"""Every chunk begins with things at multiples of this many pixels: one latent cell."""
STRIDE = (16, 32, 64)
"""Pixels per chunk, for each of `scene.SPEEDS`."""
PARTS = 3
"""Places are counted in this part of a pixel between frames, which makes every stride whole."""
ANGLES = 96
SPIN = (1, 2, 4)
"""A full turn has `ANGLES` steps, of which a thing that spins makes so many per frame, for each of `scene.SPEEDS`."""
PAN = 32
"""Pixels per chunk by which the near part of the scenery moves under a camera that pans; the far part moves half."""
SCROLL = 2 * SIZE
"""The scenery is the same again after so many pixels of panning."""
FALL = 12
"""Snow is the same again after so many frames; rain and wind after a third of them."""
QUARTER = 72
"""Frames from one hour to the next when time passes."""
BOUNDS = ((64, 192), (32, 224))
"""Between these (y, x) things bounce."""
HOME = ((128, 128), (96, 64))
"""Where the first thing of a stream begins, (y, x): alone, or with a second one."""
APART = (64, 128)
"""Where a second thing appears, seen from the first."""
KEYBOARD = (
    Control("move_x", keys=("ArrowLeft", "ArrowRight")),
    Control("move_y", keys=("ArrowUp", "ArrowDown")),
    Control("pan_x", keys=("KeyA", "KeyD"), whole_chunk=True),
    Control("stop", "button", keys=("Space",)),
)
"""What steers a stream, one vector per latent frame. `move_x` and `move_y` move the first thing right and down at up to
`STEERED` pixels per chunk, `stop` keeps it where it is, whatever the scene says. `pan_x` pans the camera right or left,
in either direction at the usual speed, and is the same all over a chunk. At 0 the scene says what moves."""
CONTROLS = tuple(control.name for control in KEYBOARD)
STEERED = 32

_DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@dataclass(frozen=True)
class Track:
    """N streams over T frames. Things: first, second (whose values mean nothing where there is none).

    scenes int64 `[N, T, fields]`; place int64 `[N, T, 2, 2]`: (y, x) of both things' centres, in [0, SIZE); angle
    int64 `[N, T, 2]` in [0, ANGLES); scroll int64 `[N, T]` in [0, SCROLL); light float32 `[N, T, 4]`: shares of
    day, dusk, night and dawn; fall int64 `[N, T]` in [0, FALL).
    """

    scenes: Tensor
    place: Tensor
    angle: Tensor
    scroll: Tensor
    light: Tensor
    fall: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Track:
        """A track of each field after `change`."""
        return Track(**{f.name: change(getattr(self, f.name)) for f in fields(Track)})

    def flat(self) -> Track:
        """All frames one after the other: N and T as one axis."""
        return self.each(lambda part: part.flatten(0, 1))

    def rows(self, rows: Tensor | slice) -> Track:
        """The streams, or the frames of a flat track, of `rows`."""
        return self.each(lambda part: part[rows])

    def put(self, rows: Tensor, some: Track) -> None:
        """Put `some` in the place of the streams, or of the frames of a flat track, of `rows`. Mutates: self."""
        for field in fields(Track):
            getattr(self, field.name)[rows] = getattr(some, field.name)

    def middles(self) -> Tensor:
        """Places `[N, latent frames, 2, 2]` of things halfway through each latent frame, float32."""
        return self.place[:, FRAMES_PER_LATENT // 2 :: FRAMES_PER_LATENT].float()


def join(tracks: list[Track]) -> Track:
    """Tracks that follow each other in time."""
    return Track(**{f.name: torch.cat([getattr(t, f.name) for t in tracks], 1) for f in fields(Track)})


def shares_of_light(phase: Tensor) -> Tensor:
    """Shares of day, dusk, night and dawn `[..., 4]` at `phase` in [0, 4), where the hours are 0, 1, 2, 3."""
    away = (phase[..., None] - torch.arange(4.0)).remainder(4)
    return (1 - torch.minimum(away, 4 - away)).clamp(min=0)


def phase_of(light: Tensor) -> Tensor:
    """The phase `[...]` in [0, 4) of shares of light `[..., 4]`: the inverse of `shares_of_light`."""
    hours = torch.where(light[..., 3:] > 0, torch.tensor([4.0, 1.0, 2.0, 3.0]), torch.arange(4.0))
    return (light * hours).sum(-1).remainder(4)


def pixels(parts: Tensor) -> Tensor:
    """Whole pixels of places counted in `PARTS` of one, to the nearest."""
    return (parts + PARTS // 2).div(PARTS, rounding_mode="floor")


def steps(stride: int) -> int:
    """What a stride, in pixels per chunk, is per frame, in `PARTS` of a pixel."""
    return stride * PARTS // CHUNK_FRAMES


def paced(kind: Tensor, rate: Tensor, unit: int, least: Tensor) -> Tensor:
    """How far something moves in each frame of a chunk, in whole parts, `[N, F * FRAMES_PER_LATENT]`, that moves at
    `rate` `[N, F]` parts per latent frame: each run of latent frames of one `kind` `[N, F]`, in which the rate is the
    same, ends a multiple of `unit` from where it began; where `least` bool `[N, F]`, at least one, if it moves at all.
    """
    count, frames = kind.shape
    new = torch.cat([torch.zeros(count, 1, dtype=torch.int64), (kind[:, 1:] != kind[:, :-1]).long()], 1).cumsum(1)
    same = (new[:, :, None] == new[:, None, :]).long()
    length, first = same.sum(2), same.argmax(2)
    whole = (length * rate.abs() / unit).round().long()
    total = torch.where(least & (rate != 0), whole.clamp(min=1), whole) * unit
    at = (torch.arange(frames) - first)[:, :, None] * FRAMES_PER_LATENT + torch.arange(FRAMES_PER_LATENT)
    total, span = total[:, :, None], length[:, :, None] * FRAMES_PER_LATENT
    moved = (at + 1) * total // span - at * total // span
    return (moved * rate.sign().long()[:, :, None]).flatten(1)


@dataclass(frozen=True)
class Steering:
    """What moves in each of a chunk's T frames. move int64 `[N, T, 2]`: how far the first thing is moved (y, x), in
    `PARTS` of a pixel, where `held` bool `[N, T]` says that controls move it; elsewhere `pace` int64 `[N, T]` is its
    speed, in `PARTS` per frame, and `spin` how many `ANGLES` it turns, as its scene says; pan int64 `[N, T]`: how far
    the scenery scrolls, in `PARTS`."""

    move: Tensor
    held: Tensor
    pace: Tensor
    spin: Tensor
    pan: Tensor


def steering(scenes: Tensor, controls: Tensor) -> Steering:
    """That of a chunk under `scenes` `[N, fields]` and `controls` `[N, F, K]`."""
    x, y, pan, stop = controls.unbind(2)
    stopped = stop > 0
    held = stopped | (x != 0) | (y != 0)
    cell, latents = LATTICE * PARTS, controls.shape[1]
    move = []
    for axis in (y, x):
        value = torch.where(stopped, 0.0, axis)
        rate = value * (STEERED * PARTS / CHUNK_LATENTS)
        move.append(paced((value * 64).long(), rate, cell, torch.ones_like(held)))
    rank = scenes[:, COLUMN["speed"]]
    kind, never = held.long(), torch.zeros_like(held)
    speed = torch.tensor(STRIDE)[rank, None] * (PARTS / CHUNK_LATENTS)
    turn = torch.tensor(SPIN)[rank, None].float() * FRAMES_PER_LATENT
    camera = scenes[:, COLUMN["camera"]]
    side = (camera == CAMERAS.index("right")).long() - (camera == CAMERAS.index("left")).long()
    side = torch.where(pan != 0, pan.sign().long(), side[:, None])
    return Steering(
        torch.stack(move, 2),
        held.repeat_interleave(FRAMES_PER_LATENT, 1),
        paced(kind, speed.expand(-1, latents), cell, never),
        paced(kind, turn.expand(-1, latents), CHUNK_FRAMES, never),
        (side * steps(PAN)).repeat_interleave(FRAMES_PER_LATENT, 1),
    )


def homes(scenes: Tensor) -> Tensor:
    """Where the things of streams with `scenes` `[N, fields]` begin, in `PARTS` of a pixel, int64 `[N, 2, 2]`."""
    first = torch.tensor(HOME)[scenes[:, COLUMN["second"]]]
    return torch.stack([first, (first + torch.tensor(APART)).remainder(SIZE)], 1) * PARTS


STATE = ("place", "way", "angle", "scroll", "phase", "fall")


class Streams:
    """The state of N streams between two chunks: that of the first frame of the next one.

    place int64 `[N, 2, 2]` and scroll int64 `[N]`, in `PARTS` of a pixel; way int64 `[N, 2, 2]` (1 or -1: where things
    that bounce go), angle int64 `[N, 2]`, phase float `[N]`, fall int64 `[N]`; before: the scenes of the last chunk, or
    None.
    """

    def __init__(self, scenes: Tensor, anywhere: torch.Generator | None = None) -> None:
        """Streams that begin with `scenes` `[N, fields]`, or, if `anywhere` is given, that have begun long ago."""
        count = len(scenes)
        self.place = homes(scenes)
        self.way = torch.ones(count, 2, 2, dtype=torch.int64)
        self.angle = torch.zeros(count, 2, dtype=torch.int64)
        self.scroll = torch.zeros(count, dtype=torch.int64)
        hour = scenes[:, COLUMN["hour"]]
        self.phase = hour.float().remainder(4)  # what passes begins by day
        self.fall = torch.zeros(count, dtype=torch.int64)
        self.before: Tensor | None = None
        if anywhere is not None:
            self._scatter(scenes, anywhere)

    def _scatter(self, scenes: Tensor, generator: torch.Generator) -> None:
        count = len(scenes)

        def pick(high: int, *shape: int) -> Tensor:
            return torch.randint(high, (count, *shape), generator=generator)

        self.place = pick(SIZE // LATTICE, 2, 2) * (LATTICE * PARTS)
        self.way = pick(2, 2, 2) * 2 - 1
        self.angle = pick(ANGLES // CHUNK_FRAMES, 2) * CHUNK_FRAMES
        self.scroll = pick(SCROLL // PAN) * (PAN * PARTS)
        passing = scenes[:, COLUMN["hour"]] == HOURS.index("passing")
        chunks = QUARTER // CHUNK_FRAMES
        self.phase = torch.where(passing, pick(4 * chunks) / chunks, self.phase)
        self.before = scenes

    def take(self, rows: Tensor) -> Streams:
        """A copy of the streams of `rows` `[n]`, which have begun."""
        assert self.before is not None, "streams that have not begun are made anew"
        some = Streams(self.before[rows])
        some.before = self.before[rows]
        for name in STATE:
            setattr(some, name, getattr(self, name)[rows])
        return some

    def put(self, rows: Tensor, some: Streams) -> None:
        """Put `some` in the place of the streams of `rows` `[n]`. Mutates: self."""
        assert self.before is not None and some.before is not None, "streams that have not begun are made anew"
        self.before[rows] = some.before
        for name in STATE:
            getattr(self, name)[rows] = getattr(some, name)

    def follow(self, other: Streams) -> None:
        """Have things and scenery where `other`, of as many streams, has them, going the same way. Mutates: self."""
        for name in ("place", "way", "angle", "scroll"):
            setattr(self, name, getattr(other, name).clone())

    def lose(self, scenes: Tensor, lost: Tensor) -> None:
        """Let the things `lost` bool `[N, 2]` of streams with `scenes` begin where those of new streams do, as these
        would. Mutates: self."""
        self.place = torch.where(lost[:, :, None], homes(scenes), self.place)
        self.way = torch.where(lost[:, :, None], 1, self.way)
        self.angle = torch.where(lost, 0, self.angle)

    def play(self, scenes: Tensor, frames: int = CHUNK_FRAMES, controls: Tensor | None = None) -> Track:
        """The next chunk, or its first `frames` frames, under `scenes` `[N, fields]` and `controls` `[N, CHUNK_LATENTS,
        K]` (None: all 0). Mutates: self."""
        controls = torch.zeros(len(scenes), CHUNK_LATENTS, len(CONTROLS)) if controls is None else controls
        steered = steering(scenes, controls)
        before = scenes if self.before is None else self.before
        self._appear(before, scenes)
        light_before = shares_of_light(self.phase)
        made: dict[str, list[Tensor]] = {name: [] for name in ("place", "angle", "scroll", "light", "fall")}
        for frame in range(frames):
            passed = self._light(scenes, light_before, (frame + 1) / CHUNK_FRAMES)
            for name, value in (
                ("place", pixels(self.place).remainder(SIZE)), ("angle", self.angle),
                ("scroll", pixels(self.scroll).remainder(SCROLL)), ("light", passed), ("fall", self.fall),
            ):  # fmt: skip
                made[name].append(value.clone())
            self._move(scenes, steered, frame)
        self._settle(scenes, frames)
        self.before = scenes.clone()
        every = scenes[:, None].expand(-1, frames, -1)
        return Track(scenes=every, **{name: torch.stack(values, 1) for name, values in made.items()})

    def _appear(self, before: Tensor, scenes: Tensor) -> None:
        """What begins with this chunk: a second thing, a bounce, a new weather."""
        column = COLUMN["second"]
        new = (scenes[:, column] == 1) & (before[:, column] == 0)
        beside = (self.place[:, 0] + torch.tensor(APART) * PARTS).remainder(SIZE * PARTS)
        self.place[:, 1] = torch.where(new[:, None], beside, self.place[:, 1])
        for thing, name in enumerate(("motion", "second_motion")):
            bouncing = scenes[:, COLUMN[name]] == MOTIONS.index("bouncing")
            fresh = bouncing & (before[:, COLUMN[name]] != scenes[:, COLUMN[name]])
            fresh |= bouncing & new if thing else fresh
            self.way[:, thing] = torch.where(fresh[:, None], 1, self.way[:, thing])
            spinning = scenes[:, COLUMN[name]] == MOTIONS.index("spinning")
            self.angle[:, thing] = torch.where(spinning, self.angle[:, thing], 0)
        clear = scenes[:, COLUMN["weather"]] == WEATHERS.index("clear")
        other = scenes[:, COLUMN["weather"]] != before[:, COLUMN["weather"]]
        self.fall = torch.where(other | clear, 0, self.fall)

    def _move(self, scenes: Tensor, steered: Steering, frame: int) -> None:
        speeds, table = torch.tensor([steps(s) for s in STRIDE]), torch.zeros(len(MOTIONS), 2, dtype=torch.int64)
        for name, direction in _DIRECTIONS.items():
            table[MOTIONS.index(name)] = torch.tensor(direction)
        low, high = (torch.tensor(BOUNDS) * PARTS).unbind(1)
        for thing, prefix in enumerate(("", "second_")):
            motion = scenes[:, COLUMN[prefix + "motion"]]
            rank = scenes[:, COLUMN[prefix + "speed"]]
            speed = speeds[rank, None] if thing else steered.pace[:, frame, None]
            place, way, still = (each[:, thing].clone() for each in (self.place, self.way, self.angle))
            drift = (place + table[motion] * speed).remainder(SIZE * PARTS)
            way = torch.where(place >= high, -1, torch.where(place <= low, 1, way))
            ahead = place + way * speed
            over, under = (way > 0) & (ahead > high), (way < 0) & (ahead < low)
            ahead = torch.where(over, 2 * high - ahead, torch.where(under, 2 * low - ahead, ahead))
            bouncing = (motion == MOTIONS.index("bouncing"))[:, None]
            self.place[:, thing] = torch.where(bouncing, ahead, drift)
            self.way[:, thing] = torch.where(bouncing, torch.where(over, -1, torch.where(under, 1, way)), 1)
            spinning = motion == MOTIONS.index("spinning")
            turned = (self.angle[:, thing] + (torch.tensor(SPIN)[rank] if thing else steered.spin[:, frame])) % ANGLES
            self.angle[:, thing] = torch.where(spinning, turned, self.angle[:, thing])
            if not thing:
                held, move = steered.held[:, frame, None], steered.move[:, frame]
                moved = (place + move).remainder(SIZE * PARTS)
                self.place[:, 0] = torch.where(held, moved, self.place[:, 0])
                # What bounces goes on the way it was moved, else right and down: as the pictures show.
                self.way[:, 0] = torch.where(held, torch.where(move < 0, -1, 1), self.way[:, 0])
                self.angle[:, 0] = torch.where(held[:, 0], still, self.angle[:, 0])
        self.scroll = (self.scroll + steered.pan[:, frame]).remainder(SCROLL * PARTS)
        self.fall = (self.fall + 1).remainder(FALL)

    def _light(self, scenes: Tensor, before: Tensor, share: float) -> Tensor:
        """Light `[N, 4]` when `share` of a chunk has gone: a new hour has come when the chunk is over."""
        hour = scenes[:, COLUMN["hour"]]
        passing = (hour == HOURS.index("passing"))[:, None]
        passed = shares_of_light((self.phase + share * CHUNK_FRAMES / QUARTER).remainder(4))
        fixed = torch.lerp(before, shares_of_light(hour.float()), min(1.0, share))
        return torch.where(passing, passed, fixed)

    def _settle(self, scenes: Tensor, frames: int) -> None:
        hour = scenes[:, COLUMN["hour"]]
        passing = hour == HOURS.index("passing")
        self.phase = torch.where(passing, (self.phase + frames / QUARTER).remainder(4), hour.float())
