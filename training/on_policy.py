"""Pasts that the model made itself: streams that the network in training plays on, and what should have come next.

A stream that goes on for long sees nothing but its own chunks, whose small faults add up: a star that crosses the edge
of the picture loses an arm, and is copied without it ever after. So the network plays streams of its own while it is
trained. This is DAgger (Ross, Gordon, Bagnell 2011; decision 0006): the teacher answers on the states that the pupil
comes to.

The world keeps the state that each stream should be in. Before it says how the next chunk must look, the state is moved
to where things and scenery are seen in the network's last chunk, on the lattice that chunks begin on, so that small
errors are put right; a thing of which too little is left begins again where streams begin. What another thing may hide
goes on where it should be, seen or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.tiny.scene import HOURS, SIZES
from training import loop
from training.batches import TrackEncoder
from training.keys import Player
from training.scene_rows import COLUMN
from training.windows import CHUNK, Windows
from training.world import shapes
from training.world.render_batch import draw_frames
from training.world.scenes import draw_scenes
from training.world.tracks import (
    CHUNK_FRAMES,
    CONTROLS,
    LATTICE,
    PAN,
    PARTS,
    QUARTER,
    SCROLL,
    SIZE,
    Streams,
    Track,
    join,
    phase_of,
    shares_of_light,
)

PAST, CLEAN_PAST = 4, 2
"""Chunks that a new one sees in a stream's window of `staircase`, and in its `clean` one."""
FRESH = 1 / 80
"""Share of the steps after which a stream begins anew."""
LOST = 0.3
"""A thing of which less than this share is to be seen is gone, and begins where streams begin."""
REACH, STEP = 20, 4
"""Pixels each way, and between two looks, in which a thing is looked for around where it should be."""
SLIPS = (-PAN, 0, PAN)
"""Pixels of scrolling by which the scenery may be off: a chunk of the camera's way."""
PHASE_SLIPS = (-CHUNK_FRAMES / QUARTER, 0.0, CHUNK_FRAMES / QUARTER)
"""Phases by which light that passes may be off: what a chunk takes."""
MOVES = [CONTROLS.index(name) for name in ("move_x", "move_y", "stop")]
AT_ONCE = {"cpu": 8, "cuda": 64}
"""Streams that are looked at together: the places where a thing is tried take 0.1 GB per stream."""


Flow = Callable[[Tensor, Tensor, int, Tensor, Tensor], Tensor]
"""Past `[B, PAST, C, CHUNK, h, w]`, noisy chunk `[B, C, CHUNK, h, w]`, at which step it is, the ids `[B, tokens]` of
each stream's sentence, and the controls `[B, PAST + 1, CHUNK, K]` of past and chunk, to the chunk's flow."""


@dataclass(frozen=True)
class Correction:
    """What is seen of N streams, on the CPU: how much further the scenery has scrolled, in pixels, int64 `[N]`, and
    light that passes has gone, in phases, float32 `[N]`; how far each thing is from where it should be, int64
    `[N, 2, 2]` (y, x), and the share of it that is there, float32 `[N, 2]`. Of what may be hidden: that it is whole,
    and where it should be."""

    scroll: Tensor
    phase: Tensor
    shift: Tensor
    seen: Tensor


class OwnPasts:
    """`streams` streams that the network plays, which take turns: `scenes` `[streams, fields]`, and `latents` of their
    last chunks `[streams, PAST, C, CHUNK, h, w]`, which `controls` `[streams, PAST, CHUNK, K]` steered."""

    def __init__(self, encode: TrackEncoder, streams: int, generator: torch.Generator) -> None:
        self.encode = encode
        self.scenes = draw_scenes(streams, generator)
        self.ids = encode.tokens(self.scenes)
        self.streams = Streams(self.scenes)
        track = join([self.streams.play(self.scenes) for _ in range(PAST)])
        self.latents = self._chunks(track)
        self.last = self._last(track)
        self.place = self._middles(track)
        self.player = Player.of(streams, generator)
        self.controls = torch.zeros(streams, PAST, CHUNK, len(CONTROLS))
        self._next = 0

    @torch.no_grad()  # not inference mode: what it makes is trained on
    def turn(self, count: int, flow: Flow, levels: tuple[float, ...], generator: torch.Generator) -> Windows:
        """Extend the next `count` streams by a chunk that the network makes, and return training windows for it.

        Returns:
            windows of PAST chunks that the network made and the one that should follow, of those streams whose first
            thing is where it was steered to, and of all where none is. The others begin anew. Mutates: self.
        """
        rows = (self._next + torch.arange(count)) % len(self.scenes)
        self._next = (self._next + count) % len(self.scenes)
        past = self.latents[rows]
        windows, ids, astray = self._go_on(rows, past, generator)
        chunk = next_chunk(past, ids, windows.controls, flow, levels, generator)
        self.latents[rows] = torch.cat([past[:, 1:], chunk[:, None]], 1)
        fresh = rows[(torch.rand(count, generator=generator) < FRESH) | astray]
        if len(fresh):
            self._begin_anew(fresh, generator)
        return windows if astray.all() or not astray.any() else windows.rows((~astray).nonzero()[:, 0])

    def _go_on(self, rows: Tensor, past: Tensor, generator: torch.Generator) -> tuple[Windows, Tensor, Tensor]:
        """Windows of the streams of `rows`: `past`, their latents, and what should follow; the ids of their sentences;
        and which have gone elsewhere than they were steered, bool `[n]`. Mutates: self."""
        scenes, ids = self.scenes[rows], self.ids[rows]
        streams = self.streams.take(rows)
        astray = self._correct(streams, past[:, -1], rows)
        controls = torch.cat([self.controls[rows], self.player.next_chunk(rows, generator)[:, None]], 1)
        self.controls[rows] = controls[:, 1:]
        track = streams.play(scenes, controls=controls[:, -1])
        place = torch.cat([self.place[rows], self._middles(track)], 1)
        latents = torch.cat([past, self._chunks(track)], 1)
        every, words = (each[:, None].expand(-1, PAST + 1, -1) for each in (scenes.to(past.device), ids))
        self.streams.put(rows, streams)
        self.last.put(rows, self._last(track))
        self.place[rows] = place[:, 1:]
        start = torch.zeros(len(rows), dtype=torch.bool)
        return Windows(latents, every, start, place, latents, words, controls.to(past.device)), ids, astray

    def _begin_anew(self, rows: Tensor, generator: torch.Generator) -> None:
        """Put new streams in the place of those of `rows`. Mutates: self."""
        scenes = draw_scenes(len(rows), generator)
        fresh = Streams(scenes)
        track = join([fresh.play(scenes) for _ in range(PAST)])
        self.scenes[rows], self.ids[rows] = scenes, self.encode.tokens(scenes)
        self.latents[rows], self.place[rows] = self._chunks(track), self._middles(track)
        self.streams.put(rows, fresh)
        self.last.put(rows, self._last(track))
        self.controls[rows], self.player.held[rows] = 0, 0

    def _chunks(self, track: Track) -> Tensor:
        """Latents `[B, chunks, C, CHUNK, h, w]` of a track of whole chunks."""
        latents: Tensor = self.encode.latents_of(track).unflatten(1, (-1, CHUNK)).transpose(2, 3)
        return latents

    def _middles(self, track: Track) -> Tensor:
        """Places `[B, chunks, CHUNK, 2, 2]` halfway through each latent frame."""
        places: Tensor = track.middles().unflatten(1, (-1, CHUNK)).to(self.encode.device)
        return places

    @staticmethod
    def _last(track: Track) -> Track:
        """The last frame of every stream: what its picture should show, `[B, ...]`."""
        return track.each(lambda part: part[:, -1].clone())

    def _correct(self, streams: Streams, chunk: Tensor, rows: Tensor) -> Tensor:
        """Move `streams` to what is seen in the last frame of their last `chunk` `[B, C, CHUNK, h, w]`. Returns of
        which the first thing is not to be seen where it was steered to, bool `[B]`. Mutates: streams."""
        frames = self.encode.last_frames(chunk, 1, AT_ONCE[chunk.device.type])[:, 0]
        found = locate(frames.clamp(0, 1), self.last.rows(rows))
        streams.scroll = (streams.scroll + found.scroll * PARTS) % (SCROLL * PARTS)
        streams.phase = (streams.phase + found.phase) % 4
        cell = LATTICE * PARTS
        moved = (streams.place + found.shift * PARTS + cell // 2) // cell * cell % (SIZE * PARTS)
        streams.place = moved
        streams.lose(self.scenes[rows], found.seen < LOST)
        steered = (self.controls[rows, -1][..., MOVES] != 0).flatten(1).any(1)
        return steered & (found.seen[:, 0] < LOST)


def next_chunk(
    past: Tensor, ids: Tensor, controls: Tensor, flow: Flow, levels: tuple[float, ...], generator: torch.Generator
) -> Tensor:
    """The network's next chunk `[B, C, CHUNK, h, w]`."""
    chunk = torch.zeros_like(past[:, 0])
    for step, level in enumerate(levels):
        noise = loop.noise_like(chunk, generator)
        noisy = sampling.add_noise(chunk, noise, torch.full((1,) * chunk.ndim, level, device=chunk.device))
        chunk = sampling.clean_from_flow(noisy, flow(past, noisy, step, ids, controls), level)
    return chunk


@torch.no_grad()
def locate(frames: Tensor, should: Track) -> Correction:
    """Where things and scenery are in `frames` `[N, 3, SIZE, SIZE]`; `should`, of as many frames, is where they
    belong."""
    scroll, phase, ground = _look_at_scenery(frames, should)
    shifts = torch.zeros(len(frames), 2, 2, dtype=torch.int64, device=frames.device)
    seens = torch.ones(len(frames), 2, device=frames.device)
    for thing, prefix in enumerate(("", "second_")):
        there = should.scenes[:, COLUMN["second"]] >= thing
        for size in range(len(SIZES)):
            alike = (there & (should.scenes[:, COLUMN[prefix + "size"]] == size)).nonzero()[:, 0]
            for rows in alike.split(AT_ONCE[frames.device.type]) if len(alike) else ():
                here = rows.to(frames.device)
                found = _find(frames[here], ground[here], should.rows(rows), thing, size)
                shifts[here, thing], seens[here, thing] = found
    behind = (may_be_hidden(should) & (should.scenes[:, COLUMN["second"]] == 1)).to(frames.device)
    shifts[behind, 1], seens[behind, 1] = 0, 1.0
    return Correction(scroll, phase, shifts.cpu(), seens.cpu())


def _look_at_scenery(frames: Tensor, should: Track) -> tuple[Tensor, Tensor, Tensor]:
    """How much further than in `should` the scenery of `frames` has scrolled and its light passed, as a `Correction`
    says it, and pictures of it as it is, like `frames`."""
    slips = torch.tensor(SLIPS)
    tries = _repeat(should, len(slips))
    tries = replace(tries, scroll=(tries.scroll + slips.repeat(len(frames))).remainder(SCROLL))
    best, ground = _nearest_scenery(frames, tries, 1e-5 * slips.abs())
    scroll = slips[best.cpu()]
    seen, phase = replace(should, scroll=(should.scroll + scroll).remainder(SCROLL)), torch.zeros(len(frames))
    if len(passing := (should.scenes[:, COLUMN["hour"]] == HOURS.index("passing")).nonzero()[:, 0]):
        here, steps = passing.to(frames.device), torch.tensor(PHASE_SLIPS)
        tries = _repeat(seen.rows(passing), len(steps))
        light = shares_of_light((phase_of(tries.light) + steps.repeat(len(passing))).remainder(4))
        best, ground[here] = _nearest_scenery(frames[here], replace(tries, light=light), torch.zeros(len(steps)))
        phase[passing] = steps[best.cpu()]
    return scroll, phase, ground


def _repeat(track: Track, times: int) -> Track:
    return track.each(lambda part: part.repeat_interleave(times, 0))


def _nearest_scenery(frames: Tensor, tries: Track, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """Which of its `tries` each of `frames` `[N, 3, SIZE, SIZE]` is nearest to, `[N]`, and pictures of these without
    things, like `frames`. A frame has as many tries as `penalty` `[tries]` is long, which is added to their errors."""
    grounds = draw_frames(tries, frames.device, things=False).unflatten(0, (len(frames), len(penalty)))
    error = (grounds - frames[:, None]).abs().clamp(max=0.15).mean((2, 3, 4)) + penalty.to(frames.device)
    best = error.argmin(1)
    return best, grounds[torch.arange(len(frames), device=frames.device), best]


def may_be_hidden(track: Track) -> Tensor:
    """Whether the first thing of every frame, which is in front, covers a part of where the second one is, bool
    `[N]`."""
    radius = torch.tensor([shapes.RADIUS[name] for name in SIZES])
    first, second = (radius[track.scenes[:, COLUMN[name]]] for name in ("size", "second_size"))
    away = (track.place[:, 0] - track.place[:, 1] + SIZE // 2).remainder(SIZE) - SIZE // 2
    hidden: Tensor = torch.linalg.vector_norm(away.float(), dim=1) < first + second
    return hidden


def _find(frames: Tensor, ground: Tensor, should: Track, thing: int, size: int) -> tuple[Tensor, Tensor]:
    """How far things of one size are from where they should be, `[N, 2]` (y, x), and the share of each that is there,
    `[N]`."""
    prefix, device = ("", "second_")[thing], frames.device
    color, shape = (should.scenes[:, COLUMN[prefix + name]].to(device) for name in ("color", "shape"))
    alpha, rgb = shapes.sprites(color, shape, size, should.angle[:, thing].to(device), should.light.to(device))
    half = shapes.HALF[SIZES[size]]
    span = torch.arange(-half - REACH, half + REACH + 1, device=device)
    y, x = ((should.place[:, thing, axis, None].to(device) + span).remainder(SIZE) for axis in (0, 1))
    every = torch.arange(len(frames), device=device)
    side, steps = 2 * half + 1, 2 * REACH // STEP + 1

    def windows(pictures: Tensor) -> Tensor:
        part = pictures.permute(0, 2, 3, 1)[every[:, None, None], y[:, :, None], x[:, None, :]]  # [N, L, L, 3]
        return part.permute(0, 3, 1, 2).unfold(2, side, STEP).unfold(3, side, STEP)  # [N, 3, steps, steps, side, side]

    seen, under, cover = windows(frames), windows(ground), alpha[:, :, None, None]
    drawn = torch.lerp(under, rgb[:, :, None, None], cover)
    error = ((seen - drawn).square() * cover).sum((1, 4, 5))
    best = error.flatten(1).argmin(1)
    shift = torch.stack([best // steps, best % steps], 1) * STEP - REACH
    whole, there = (
        ((some - under).abs().sum(1) * cover[:, 0]).flatten(1, 2)[every, best].flatten(1) for some in (drawn, seen)
    )
    return shift, torch.minimum(whole, there).sum(1) / whole.sum(1).clamp(min=1e-6)
