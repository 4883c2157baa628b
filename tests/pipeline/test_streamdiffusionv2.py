"""StreamDiffusionV2's streams as published, against lists and loops in float64: its adaptive sink, and how video goes
in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from streamdiff.commands.reference import ReferenceRun
from streamdiff.models import sampling
from streamdiff.models.model import Model
from tests.pipeline.float64_wan import PlainWan, attend, rotated
from tests.pipeline.reference_cases import played
from tests.small import RED, small_model

CHUNKS, TIMESTEPS = 12, (700.0, 500.0)


@dataclass
class Cache:
    """One layer's keys and values at one step, `[slots, L, H, d]` (empty: zeros), and what is overwritten next.

    A frame is measured against each sink slot before it is written: cosine of the means over tokens, of rotated keys
    and of values, averaged. Where the least is below the threshold, that slot goes to the head of the queue. While
    slots are free the frame takes the next one all the same. Then it takes the head of the queue, which goes to the
    queue's end if it is not the sink's.
    """

    keys: Tensor
    values: Tensor
    queue: list[int]
    filled: int = 0
    happened: list[str] = field(default_factory=list)

    def measure(self, key: Tensor, value: Tensor, sink: int, threshold: float) -> None:
        alike = [
            (cosine(self.keys[slot].mean(0), key.mean(0)) + cosine(self.values[slot].mean(0), value.mean(0))) / 2
            for slot in range(sink)
        ]
        if min(alike) < threshold:
            self.queue.insert(0, alike.index(min(alike)))
            self.happened.append("waits" if self.filled < len(self.keys) else "replaces")

    def write(self, key: Tensor, value: Tensor, sink: int) -> None:
        if self.filled < len(self.keys):
            slot, self.filled = self.filled, self.filled + 1
        else:
            slot = self.queue.pop(0)
            if slot >= sink:
                self.queue.append(slot)
                self.happened.append("rolls")
            else:
                self.happened.append("sink")
        self.keys[slot], self.values[slot] = key, value


def cosine(one: Tensor, other: Tensor) -> float:
    """Of two means over tokens; 0 where one is empty."""
    size = float(one.norm() * other.norm())
    return float((one * other).sum()) / size if size else 0.0


class Published:
    """A stream in KV context `same_step`: a step sees what the same step of earlier frames left."""

    def __init__(self, model: Model, run: ReferenceRun, plain: PlainWan) -> None:
        self.spec, self.run, self.plain = model.spec, run, plain
        assert model.spec.adaptive_sink is not None
        self.threshold: float = model.spec.adaptive_sink
        self.size = (model.spec.latent_height // 2, model.spec.latent_width // 2)
        self.caches = [[self.empty() for _ in range(plain.layers)] for _ in run.schedule.timesteps]

    def empty(self) -> Cache:
        shape = (self.spec.window_latents, self.size[0] * self.size[1], self.plain.heads, self.plain.head_dim)
        keys, values = torch.zeros(2, *shape, dtype=torch.float64)
        return Cache(keys, values, list(range(self.spec.sink_latents, self.spec.window_latents)))

    def latents(self) -> Tensor:
        """`[chunks, C, 1, h, w]`."""
        together = self.spec.first_chunks
        made = []
        if together > 1:  # one longer chunk, without measuring, on a cache that every step begins with
            made += list(self.chunk(0, together).split(1, 1))
            for step in range(1, len(self.caches)):
                for own, first in zip(self.caches[step], self.caches[0], strict=True):
                    own.keys, own.values, own.filled = first.keys.clone(), first.values.clone(), first.filled
        return torch.stack(made + [self.chunk(first, 1) for first in range(len(made), self.run.chunks)])

    def first_step(self, first: int, count: int) -> tuple[Tensor, float, float]:
        """x_t, timestep and noise level of the first step of frames `first` and on."""
        assert self.run.initial is not None
        x_t = torch.cat(list(self.run.initial[first : first + count]), 1).double()
        return x_t, self.run.schedule.timesteps[0], self.run.schedule.sigmas[0]

    def chunk(self, first: int, count: int) -> Tensor:
        """x0 `[C, count, h, w]` of frames `first` and on, which are made together."""
        assert self.run.renoise is not None
        x_t, *begins = self.first_step(first, count)
        schedule = self.run.schedule
        levels = [begins, *zip(schedule.timesteps[1:], schedule.sigmas[1:], strict=True)]
        for step, (timestep, sigma) in enumerate(levels):
            caches = self.caches[step if count == 1 else 0]
            attention = Seen(self, caches, first, count, step)
            x0 = x_t - sigma * self.plain.flow(x_t, timestep, self.run.embeddings, attention)
            if step + 1 < schedule.steps:
                fresh = torch.cat(list(self.run.renoise[first : first + count, step]), 1).double()
                x_t = (1 - schedule.sigmas[step + 1]) * x0 + schedule.sigmas[step + 1] * fresh
        return x0


@dataclass
class Seen:
    """Self-attention of `count` frames from `first` on over `caches`, one per layer."""

    stream: Published
    caches: list[Cache]
    first: int
    count: int
    step: int

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, spec = self.caches[layer], self.stream.spec
        query, key = (rotated(x, self.first, *self.stream.size) for x in (query, key))
        if self.count == 1:
            cache.measure(key, value, spec.sink_latents, self.stream.threshold)
            cache.write(key, value, spec.sink_latents)
        else:  # each pass overwrites what the one before it has written
            cache.filled = self.count
            for slot, (one, two) in enumerate(zip(key.chunk(self.count), value.chunk(self.count), strict=True)):
                cache.keys[slot], cache.values[slot] = one, two
        return attend(query, cache.keys[: cache.filled].flatten(0, 1), cache.values[: cache.filled].flatten(0, 1))


def made_for(threshold: float, *, sink: int, together: int, window: int = 6) -> tuple[Model, PlainWan]:
    model = small_model(3, layers=3, planes=0, chunk=1, window=window, sink=sink)
    spec = replace(model.spec, adaptive_sink=threshold, rope="absolute", first_chunks=together)
    return replace(model, spec=spec), PlainWan(model.denoiser.model.state_dict(), model.denoiser.heads)


def run_of(model: Model, steps: int = len(TIMESTEPS)) -> ReferenceRun:
    generator = torch.Generator().manual_seed(7)
    initial = torch.randn(CHUNKS, *model.spec.chunk_shape, generator=generator)
    renoise = torch.randn(CHUNKS, steps - 1, *model.spec.chunk_shape, generator=generator)
    schedule = sampling.from_timesteps(TIMESTEPS)
    return ReferenceRun(model.text.encode(RED), CHUNKS, schedule, "same_step", initial=initial, renoise=renoise)


@pytest.mark.slow
@pytest.mark.parametrize(("sink", "together", "threshold"), [(3, 2, 0.2), (3, 2, 0.7), (3, 1, 0.7), (1, 1, 0.9)])
def test_a_stream_is_as_published(sink: int, together: int, threshold: float) -> None:
    """Frames that replace sink frames at once, or wait to while the ring fills; each layer and step decides."""
    model, plain = made_for(threshold, sink=sink, together=together)
    run = run_of(model)
    published = Published(model, run, plain)
    expected = published.latents()
    happened = [each.happened for step in published.caches for each in step]
    assert all("waits" in each for each in happened)
    if threshold > 0.2:
        assert len(set(map(tuple, happened))) > 2 and any(each.count("replaces") > 1 for each in happened)
    got = played(model, run)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-6)
    assert torch.equal(played(model, run, stages=3), got)


def test_without_a_threshold_that_is_met_it_is_a_plain_sink() -> None:
    model, _ = made_for(-1.0, sink=3, together=2)
    run = run_of(model)
    plain = replace(model, spec=replace(model.spec, adaptive_sink=None))
    torch.testing.assert_close(played(model, run), played(plain, run), rtol=1e-5, atol=1e-6)


class PublishedVideo(Published):
    """Video to video, with the level that follows the motion of pixels: `motion` is the largest root mean square
    difference of each frame's pictures."""

    def __init__(self, model: Model, run: ReferenceRun, plain: PlainWan, motion: list[float]) -> None:
        super().__init__(model, run, plain)
        self.told: list[int] = []
        self.mixed = [0.8]
        for moved in motion[1:]:
            together = len(self.mixed) < self.spec.first_chunks
            follows = 0.9 * (0.8 - 0.1 * min(moved / 0.2, 1.0)) + 0.1 * self.mixed[-1]
            self.mixed.append(0.8 if together else follows)

    def first_step(self, first: int, count: int) -> tuple[Tensor, float, float]:
        noise, _, _ = super().first_step(first, count)
        assert self.run.video is not None
        video = torch.cat(list(self.run.video[first : first + count]), 1).double()
        told = int(1000 * self.mixed[first]) - 100
        self.told.append(told)
        table = [1000 * 8 * raw / (1 + 7 * raw) for raw in (1 - n / 1000 for n in range(1000))]
        level = min(table, key=lambda entry: abs(entry - told)) / 1000
        return self.mixed[first] * noise + (1 - self.mixed[first]) * video, float(told), level


@pytest.mark.slow
def test_video_to_video_is_as_published() -> None:
    """x0 of the first step is made with the nearest of 1,000 shifted levels, whatever the motion."""
    model, plain = made_for(0.7, sink=3, together=2)
    generator = torch.Generator().manual_seed(9)
    motion = torch.rand(CHUNKS, generator=generator, dtype=torch.float64) / 4
    video = torch.randn(CHUNKS, *model.spec.chunk_shape, generator=generator)
    schedule = sampling.published((700, 500, 400, 0), shift=8.0, nearest=True)
    run = replace(
        run_of(model, steps=3), schedule=schedule, video=video, strength=0.8, motion_noise=True, motion=motion
    )
    published = PublishedVideo(model, run, plain, motion.tolist())
    expected = published.latents()
    got = played(model, run)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-6)
    assert len(set(published.told)) > 6 and published.told[0] == 700
    assert torch.equal(played(model, run, stages=3), got)
    exact = replace(schedule, grid_shift=None)
    assert (played(model, replace(run, schedule=exact)) - got).abs().max() > 1e-4, "the level is looked up"
    assert (played(model, replace(run, motion=None)) - got).abs().max() > 1e-3, "the motion of pixels counts"
