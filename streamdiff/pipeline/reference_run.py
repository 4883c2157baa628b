"""One stream to the letter: conditioning, noise, schedule and prompt switches are given, by chunk; latents come out.

The same ring that plays live. What comes out is a function of weights and `ReferenceRun` alone, on any number of
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.models.sampling import TIMESTEPS, Schedule
from streamdiff.pipeline.executor import LocalRing, RingExecutor
from streamdiff.pipeline.runner.init_latents import REACH, TIMESTEP_OFFSET, InitLatents
from streamdiff.pipeline.runner.noise import Noise, SeededNoise, TensorNoise
from streamdiff.pipeline.runner.sampler import PROMPT_SWITCHES

POLICIES = (*PROMPT_SWITCHES, "reset")
MIXED = ("keep", "recache")
"""Policies of a prompt that may come little by little: the others forget what was before it."""
_NAME = 0


@dataclass(frozen=True)
class Switch:
    """A change of prompt that chunk `chunk` is the first to see; `embeddings` `[T, text_dim]`, `policy` one of
    POLICIES (`reset` starts a fresh stream there)."""

    chunk: int
    embeddings: Tensor
    policy: str = "keep"


@dataclass(frozen=True)
class ReferenceRun:
    """What to make.

    embeddings `[T, text_dim]`; `initial` `[n, C, F, h, w]` and `renoise` `[n, steps - 1, C, F, h, w]` (steps of the
    chunk that has most) take the place of the noise of `seed` for the first n chunks; `switches` rise by chunk.

    With `mix` n a switch takes n chunks: they see k/n of its embeddings, k = 1 to n, and what held before it for the
    rest, by linear interpolation; one that comes meanwhile goes on from there. Krea's way: `release_server.py` of
    github.com/krea-ai/realtime-video takes the shares 0, 1/3, 2/3 and 1, so a mix of 3 from the second of the chunks.

    `video` `[n, C, F, h, w]` is encoded input that chunks start from, mixed with noise by `strength`, 0 to 1 (None: the
    first level of the schedule); with `motion_noise` that is the most, and motion lowers it (see `init_latents`).

    Raises:
        ConfigError: a switch that is out of order, outside the stream, or of an unknown policy; one that cannot be
            mixed, for its policy or since its embeddings have another number of rows; a mix below 1; a strength
            that the schedule cannot go on from, or without a video.
    """

    embeddings: Tensor
    chunks: int
    schedule: Schedule
    kv_context: str = "clean"
    seed: int = 0
    initial: Tensor | None = None
    renoise: Tensor | None = None
    switches: tuple[Switch, ...] = field(default=())
    video: Tensor | None = None
    strength: float | None = None
    motion_noise: bool = False
    mix: int = 1

    def __post_init__(self) -> None:
        self._check_video()
        self._check_mix()
        if self.chunks < 1:
            raise ConfigError(f"chunks is {self.chunks}; at least 1 is needed")
        before = 0
        for switch in self.switches:
            if switch.policy not in POLICIES:
                raise ConfigError(f"a prompt switch is {switch.policy!r}; it can be {', '.join(POLICIES)}")
            if not before < switch.chunk < self.chunks:
                raise ConfigError(
                    f"a prompt switch is at chunk {switch.chunk}, but must be after chunk {before} and before chunk "
                    f"{self.chunks}, the end; chunks count from 0"
                )
            if switch.policy == "recache" and self.kv_context == "matched":
                raise ConfigError("prompt switch recache needs a KV context with a clean pass: clean or staircase")
            before = switch.chunk

    def noise(self, model: Model, first: int) -> Noise:
        """Noise of the stream that begins at chunk `first`: its own seed's, or what is given from there on."""
        seeded = SeededNoise(model.spec.chunk_shape, self.seed)
        if self.initial is None:
            return seeded
        renoise = None if self.renoise is None else self.renoise[first:]
        return TensorNoise(self.initial[first:], renoise, self.schedule, seeded)

    def source(self, first: int, together: int = 1) -> InitLatents | None:
        """Input of the stream that begins at chunk `first`, of whose chunks the first are made `together`."""
        if self.video is None:
            return None
        video, strength = self.video[first:], self._strength
        if self.motion_noise:
            return InitLatents.following_motion(video, strength, together=together)
        timestep = self.schedule.timesteps[0] if self.strength is None else TIMESTEPS * strength
        return InitLatents.steady(video, strength, timestep)

    @property
    def _strength(self) -> float:
        return self.schedule.sigmas[0] if self.strength is None else self.strength

    def _check_video(self) -> None:
        if self.video is None:
            if self.strength is not None or self.motion_noise:
                raise ConfigError(
                    "strength and motion noise say how input is mixed with noise; there is no input video"
                )
            return
        if len(self.video) < self.chunks:
            raise ConfigError(f"the input video has {len(self.video)} chunks, but {self.chunks} are to be made")
        least = self._strength - (REACH + TIMESTEP_OFFSET + 1 / TIMESTEPS if self.motion_noise else 0)
        following = [levels.sigmas[1] for levels in (self.schedule, self.schedule.of(0)) if levels.steps > 1]
        if not max(following, default=0) < least <= self._strength <= 1:
            motion = f", of which motion takes up to {REACH + TIMESTEP_OFFSET:g}" if self.motion_noise else ""
            raise ConfigError(
                f"strength is {self._strength:g}{motion}; it must be at most 1, and above the noise level of the "
                f"second step, {max(following, default=0):g}"
            )

    def _check_mix(self) -> None:
        if self.mix < 1:
            raise ConfigError(f"prompt mix is {self.mix}; it is a number of chunks, so at least 1")
        rows = len(self.embeddings)
        for switch in self.switches if self.mix > 1 else ():
            if switch.policy in POLICIES and switch.policy not in MIXED:
                raise ConfigError(
                    f"prompt switch {switch.policy} forgets what was before it, so there is nothing to mix with; a "
                    f"prompt mix goes with {' or '.join(MIXED)}"
                )
            if len(switch.embeddings) != rows:
                raise ConfigError(
                    f"prompt embeddings of {rows} and of {len(switch.embeddings)} rows cannot be mixed; pad them to "
                    "the same number, as the model's text encoder does"
                )

    def _single(self) -> list[Switch]:
        """The switches, each that takes several chunks as one for each of them."""
        if self.mix == 1:
            return list(self.switches)
        single, now = [], self.embeddings
        ends = [switch.chunk for switch in self.switches[1:]] + [self.chunks]
        for switch, end in zip(self.switches, ends, strict=True):
            before = now
            for share in range(1, min(self.mix, end - switch.chunk) + 1):
                now = before.lerp(switch.embeddings.to(before), share / self.mix)
                single.append(replace(switch, chunk=switch.chunk + share - 1, embeddings=now))
        return single

    @property
    def segments(self) -> list[tuple[Switch, list[Switch], int]]:
        """The fresh streams of which it consists: how each begins, its other switches, and the chunk where it ends."""
        begins = [Switch(0, self.embeddings, "reset"), *(each for each in self.switches if each.policy == "reset")]
        ends = [begin.chunk for begin in begins[1:]] + [self.chunks]
        return [
            (begin, [each for each in self._single() if begin.chunk < each.chunk < end], end)
            for begin, end in zip(begins, ends, strict=True)
        ]


def play(
    model: Model,
    device: torch.device,
    run: ReferenceRun,
    *,
    stages: int = 1,
    fresh: Callable[[], object] = lambda: None,
) -> Iterator[Tensor]:
    """The latents `[C, F, h, w]` of each chunk, in order; `fresh` is called before the first of a stream that a switch
    has started. With several stages they take turns in this process.

    Raises:
        ConfigError: a stream that ends, or a prompt that changes, among chunks that the model makes together.
        ValueError: an unknown KV context, or one that the schedule does not go with.
    """
    _check_together(run, model.spec.first_chunks)
    ring = RingExecutor(model, device) if stages == 1 else LocalRing(model, device, stages)
    epochs = count(1)
    for begin, switches, end in run.segments:
        noise, source = run.noise(model, begin.chunk), run.source(begin.chunk, model.spec.first_chunks)
        if begin.chunk == 0:
            context = run.kv_context
            ring.open(
                _NAME,
                begin.embeddings,
                epoch=0,
                steps=run.schedule,
                kv_context=context,
                noise=noise,
                source=source,
            )
        else:
            ring.reset(_NAME, begin.embeddings, epoch=next(epochs), noise=noise, source=source)
            fresh()
        due = {switch.chunk - begin.chunk: switch for switch in switches}
        # Steps of a staircase wait for chunks that come after; those made for this alone are dropped.
        most = end - begin.chunk if run.kv_context != "staircase" else None
        for chunk, latents in _stream(ring, most, due, epochs):
            yield latents
            if chunk == end - begin.chunk - 1:
                break


def _check_together(run: ReferenceRun, count: int) -> None:
    """Raises ConfigError for what would cut the first `count` chunks of a stream, which are made together."""
    for begin, switches, end in run.segments:
        if end - begin.chunk < count:
            raise ConfigError(
                f"a stream from chunk {begin.chunk} to {end} has {end - begin.chunk} chunks, but the first {count} are "
                f"made together; make at least {count}"
            )
        for switch in switches:
            if switch.chunk - begin.chunk < count:
                raise ConfigError(
                    f"a prompt switch is at chunk {switch.chunk}, but the first {count} chunks from {begin.chunk} on "
                    f"are made together; switch at {begin.chunk + count} or later"
                )


def _stream(
    ring: RingExecutor, most: int | None, due: dict[int, Switch], epochs: Iterator[int]
) -> Iterator[tuple[int, Tensor]]:
    """Chunks from the stream's first on, of which at most `most` are begun; `due`: switches by the chunk that sees them
    first. Mutates: due."""
    done: dict[int, Tensor] = {}
    for chunk in count():
        while chunk not in done:
            following = ring.scheduler.next_chunk(_NAME)
            if (switch := due.pop(following, None)) is not None:
                ring.set_text(_NAME, next(epochs), switch.embeddings, switch.policy)
            goes_on = most is None or following < most
            ring.scheduler.set_room(_NAME, ring.head.spec.room(following) if goes_on else 0)
            rows, finished = ring.turn()
            assert rows or finished or ring.waiting, "the stream stands still"
            done |= {row.chunk: latents for row, latents in finished}
        yield chunk, done.pop(chunk)
