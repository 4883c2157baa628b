"""Pasts that the model made itself, in the 256 pixel world: streams that the network in training plays on, and what
should have come next (decision 0017, DAgger).

The world keeps the state that each stream should be in. Before it says how the next chunk must look, the state is moved
to where things and scenery are seen in the network's last chunk, on the lattice that chunks begin on, so that small
errors are put right; a thing of which too little is left begins again where streams begin.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.autoencoder.taehv import TAEHV, Memory
from streamdiff.models.tiny.training.autoencoder import encode_groups
from streamdiff.models.tiny.training.batches import CHUNK
from streamdiff.models.tiny.training.on_policy import FRESH, LOST, PAST, Flow
from streamdiff.models.tiny.world256 import shapes
from streamdiff.models.tiny.world256.render import render
from streamdiff.models.tiny.world256.scene import COLUMN, SIZES, draw_scenes
from streamdiff.models.tiny.world256.tracks import (
    APART,
    FRAMES_PER_LATENT,
    HOME,
    LATTICE,
    PAN,
    PARTS,
    SCROLL,
    SIZE,
    Streams,
    Track,
    join,
)
from streamdiff.models.tiny.world256.training.batches import Windows

REACH, STEP = 20, 4
"""Pixels each way, and between two looks, in which a thing is looked for around where it should be."""
SLIPS = (-PAN, 0, PAN)
"""Pixels of scrolling by which the scenery may be off: a chunk of the camera's way."""
RENDERED = 4


@dataclass(frozen=True)
class Correction:
    """What is seen of one stream: how much further the scenery has scrolled, in pixels, how far each thing is from
    where it should be, int64 `[2, 2]` (y, x), and the share of it that is there, float32 `[2]`."""

    scroll: int
    shift: Tensor
    seen: Tensor


class OwnPasts:
    """`streams` streams, which take turns."""

    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor, streams: int, generator: torch.Generator) -> None:
        self.autoencoder = autoencoder
        self.mean, self.std = mean.view(1, 1, -1, 1, 1), std.view(1, 1, -1, 1, 1)
        self.scenes = draw_scenes(streams, generator)
        self.streams = Streams(self.scenes)
        track = join([self.streams.play(self.scenes) for _ in range(PAST)])
        self.latents = self._encode(track)
        self.last = self._last(track)
        self.place = self._middles(track)
        self._next = 0

    @torch.no_grad()  # not inference mode: what it makes is trained on
    def turn(self, count: int, flow: Flow, levels: tuple[float, ...], generator: torch.Generator) -> Windows:
        """Play the next `count` streams on by a chunk of the network's own, and say what was right for it.

        Returns:
            windows of PAST chunks that the network made and the one that should follow. Mutates: self.
        """
        rows = (self._next + torch.arange(count)) % len(self.scenes)
        self._next = (self._next + count) % len(self.scenes)
        scenes, past = self.scenes[rows], self.latents[rows]
        streams = self.streams.take(rows)
        self._correct(streams, past[:, -1], rows)
        track = streams.play(scenes)
        place = torch.cat([self.place[rows], self._middles(track)], 1)
        latents = torch.cat([past, self._encode(track)], 1)
        every = scenes[:, None].expand(-1, PAST + 1, -1).to(past.device)
        start = torch.zeros(count, dtype=torch.bool, device=past.device)
        windows = Windows(latents, latents, every, start, place)
        self.streams.put(rows, streams)
        self.latents[rows] = torch.cat([past[:, 1:], self._draw(past, scenes, flow, levels, generator)[:, None]], 1)
        self.place[rows], last = place[:, 1:], self._last(track)
        for field in fields(Track):
            getattr(self.last, field.name)[rows] = getattr(last, field.name)
        self._begin_anew(rows[torch.rand(count, generator=generator) < FRESH], generator)
        return windows

    def _begin_anew(self, rows: Tensor, generator: torch.Generator) -> None:
        if not len(rows):
            return
        scenes = draw_scenes(len(rows), generator)
        fresh = Streams(scenes)
        track = join([fresh.play(scenes) for _ in range(PAST)])
        self.scenes[rows], self.latents[rows], self.place[rows] = scenes, self._encode(track), self._middles(track)
        self.streams.put(rows, fresh)
        last = self._last(track)
        for field in fields(Track):
            getattr(self.last, field.name)[rows] = getattr(last, field.name)

    def _draw(
        self, past: Tensor, scenes: Tensor, flow: Flow, levels: tuple[float, ...], generator: torch.Generator
    ) -> Tensor:
        """The network's next chunk `[B, C, CHUNK, h, w]`."""
        chunk = torch.zeros_like(past[:, 0])
        for level in levels:
            sigma = torch.full((len(past),), level, device=past.device)
            noise = torch.randn(chunk.shape, generator=generator).to(past.device)
            noisy = sampling.add_noise(chunk, noise, sigma.view(-1, 1, 1, 1, 1))
            chunk = sampling.clean_from_flow(noisy, flow(past, noisy, sigma, scenes), level)
        return chunk

    @torch.no_grad()
    def _encode(self, track: Track) -> Tensor:
        """Latents `[B, chunks, C, CHUNK, h, w]` of a track of whole chunks."""
        device, made = self.mean.device, []
        for begin in range(0, len(track.scroll), RENDERED):
            some = track.rows(slice(begin, begin + RENDERED))
            frames = render(some.flat(), device=str(device)).frames.unflatten(0, some.scroll.shape)
            made.append((encode_groups(self.autoencoder, frames).float() - self.mean) / self.std)
        latents: Tensor = torch.cat(made).unflatten(1, (-1, CHUNK)).transpose(2, 3)
        return latents

    def _middles(self, track: Track) -> Tensor:
        """Places `[B, chunks, CHUNK, 2, 2]` halfway through each latent frame."""
        middle = track.place[:, FRAMES_PER_LATENT // 2 :: FRAMES_PER_LATENT].float()
        places: Tensor = middle.unflatten(1, (-1, CHUNK)).to(self.mean.device)
        return places

    @staticmethod
    def _last(track: Track) -> Track:
        """The last frame of every stream: what its picture should show, `[B, ...]`."""
        return Track(**{f.name: getattr(track, f.name)[:, -1].clone() for f in fields(Track)})

    def _correct(self, streams: Streams, chunk: Tensor, rows: Tensor) -> None:
        """Move `streams` to what is seen in the last frame of their last `chunk` `[B, C, CHUNK, h, w]`. Mutates:
        streams."""
        latents = chunk[:, :, -2:].transpose(1, 2) * self.std + self.mean
        for index, row in enumerate(rows.tolist()):
            frame = self.autoencoder.decode(latents[index : index + 1], Memory())[0, -1]
            should = self.last.rows(slice(row, row + 1))
            found = locate(frame.clamp(0, 1), should)
            streams.scroll[index] = (streams.scroll[index] + found.scroll * PARTS) % (SCROLL * PARTS)
            home = torch.tensor(HOME)[int(self.scenes[row, COLUMN["second"]])]
            homes = torch.stack([home, (home + torch.tensor(APART)) % SIZE]) * PARTS
            cell = LATTICE * PARTS
            moved = (streams.place[index] + found.shift * PARTS + cell // 2) // cell * cell % (SIZE * PARTS)
            streams.place[index] = torch.where((found.seen < LOST)[:, None], homes, moved)


@torch.no_grad()
def locate(frame: Tensor, should: Track) -> Correction:
    """Where things and scenery are in a `frame` `[3, SIZE, SIZE]`; `should` (one flat frame) is where they belong."""
    device = str(frame.device)
    slips = torch.tensor(SLIPS)
    again = {f.name: getattr(should, f.name).repeat_interleave(len(slips), 0) for f in fields(Track)}
    tries = replace(Track(**again), scroll=(should.scroll + slips).remainder(SCROLL))
    grounds = render(tries, things=False, device=device).frames
    far = (grounds - frame).abs().clamp(max=0.15).mean((1, 2, 3)) + 1e-5 * slips.abs().to(frame.device)
    best = int(far.argmin())
    ground = grounds[best]
    shifts, seens = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2)
    things = 1 + int(should.scenes[0, COLUMN["second"]])
    for thing in range(things):
        shifts[thing], seens[thing] = _find(frame, ground, should, thing)
    return Correction(int(slips[best]), shifts, seens)


def _find(frame: Tensor, ground: Tensor, should: Track, thing: int) -> tuple[Tensor, float]:
    """How far a thing is from where it should be, `[2]` (y, x), and the share of it that is there."""
    prefix = ("", "second_")[thing]
    scene = should.scenes[0]
    size = int(scene[COLUMN[prefix + "size"]])
    color, shape = (scene[None, COLUMN[prefix + name]].to(frame.device) for name in ("color", "shape"))
    angle = should.angle[:, thing].to(frame.device)
    alpha, rgb = shapes.sprites(color, shape, size, angle, should.light.to(frame.device))
    half = shapes.HALF[SIZES[size]]
    y, x = should.place[0, thing].tolist()
    span = torch.arange(-half - REACH, half + REACH + 1)
    rows = (y + span).remainder(SIZE).to(frame.device)[:, None]
    cols = (x + span).remainder(SIZE).to(frame.device)[None, :]
    seen, under = frame[:, rows, cols], ground[:, rows, cols]
    side, steps = 2 * half + 1, 2 * REACH // STEP + 1

    def windows(picture: Tensor) -> Tensor:
        return picture.unfold(1, side, STEP).unfold(2, side, STEP)  # [3, steps, steps, side, side]

    drawn = torch.lerp(windows(under), rgb[0][:, None, None].expand(3, steps, steps, -1, -1), alpha[0][None, None])
    error = ((windows(seen) - drawn).square() * alpha[0, 0]).sum((0, 3, 4))
    best = int(error.argmin())
    shift = torch.tensor([best // steps, best % steps]) * STEP - REACH
    whole = ((drawn - windows(under)).abs().sum(0) * alpha[0, 0]).flatten(0, 1)[best]
    there = ((windows(seen) - windows(under)).abs().sum(0) * alpha[0, 0]).flatten(0, 1)[best]
    return shift, float(torch.minimum(whole, there).sum() / whole.sum().clamp(min=1e-6))
