"""A reference run: a reproducible stream from given conditioning, noise, schedule and prompt changes, to compare
latents with another implementation.

Runs on the same ring as live streams. The latents are a function of weights and `ReferenceRun` alone, on any number
of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from torch import Tensor

from streamdiff.core import PER_STEP, RECACHES
from streamdiff.errors import ConfigError
from streamdiff.models.sampling import TIMESTEPS, Schedule
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.init_latents import REACH, TIMESTEP_OFFSET, InitLatents
from streamdiff.pipeline.runner.sampler import Noise, SeededNoise, StepLevels, StreamInputs, TensorNoise

MIXED = ("keep", *RECACHES)
"""Policies of a prompt that may come little by little: the others forget what was before it."""
_NAME = 0
_WAIT_S = 1.0  # for ranks that are other processes, between two looks whether all is well


@dataclass(frozen=True)
class PromptSwitch:
    """A change of prompt that chunk `chunk` is the first to see; `embeddings` `[T, text_dim]`, `policy` one of
    `config.PROMPT_POLICIES` (`reset` starts a fresh stream there)."""

    chunk: int
    embeddings: Tensor
    policy: str = "keep"


@dataclass(frozen=True)
class ReferenceRun:
    """Inputs of a reference run.

    embeddings `[T, text_dim]`; `initial` `[n, C, F, h, w]` and `renoise` `[n, steps - 1, C, F, h, w]` (steps of the
    chunk that has most) take the place of the noise of `seed` for the first n chunks; `switches` rise by chunk.

    With `mix` n a switch takes n chunks: they see k/n of its embeddings, k = 1 to n, and what held before it for the
    rest, by linear interpolation; one that comes meanwhile goes on from there. Krea's way: `release_server.py` of
    github.com/krea-ai/realtime-video takes the shares 0, 1/3, 2/3 and 1, so a mix of 3 from the second of the chunks.

    `video` `[n, C, F, h, w]` is encoded input that chunks start from, mixed with noise by `strength`, 0 to 1 (None: the
    first level of the schedule); with `motion_noise` that is the most, and motion lowers it (see `init_latents`), that
    of the pixels if it is known: `motion` `[n]`, the largest difference of a chunk's neighbouring frames. `noise_level`
    `[n, F]` says it by latent frame instead. `levels` go before the schedule's for the steps that they have.

    `given_latents` `[n, C, F, h, w]` are finished latents of the first n chunks, which the stream goes on from: with a
    clean pass they get that alone, at timestep 0 and without noise (Self-Forcing's `initial_latent`); in `same_step`
    each step sees them at its own noise level.

    Raises:
        ConfigError: a switch that is out of order, outside the stream or among the chunks that are given; one that
            cannot be mixed, for its policy or since its embeddings have another number of rows; a mix below 1; a
            strength that the schedule cannot go on from; no chunk to make but those that are given.
    """

    embeddings: Tensor
    chunks: int
    schedule: Schedule
    kv_context: str = "clean"
    seed: int = 0
    initial: Tensor | None = None
    renoise: Tensor | None = None
    switches: tuple[PromptSwitch, ...] = field(default=())
    video: Tensor | None = None
    strength: float | None = None
    motion_noise: bool = False
    motion: Tensor | None = None
    noise_level: Tensor | None = None
    levels: StepLevels | None = None
    given_latents: Tensor | None = None
    mix: int = 1

    def __post_init__(self) -> None:
        self._check_video()
        if self.mix < 1:
            raise ConfigError(f"prompt mix is {self.mix}; it is a number of chunks, so at least 1", field="prompt_mix")
        if self.given_chunks >= self.chunks:
            raise ConfigError(
                f"chunks is {self.chunks}, and the first {self.given_chunks} are given, so there is none to make; "
                "chunks are all of the stream, those that are given included",
                field="chunks",
            )
        before = 0
        for switch in self.switches:
            if 0 < switch.chunk < self.given_chunks:
                raise ConfigError(
                    f"a prompt switch is at chunk {switch.chunk}, but the first {self.given_chunks} are given; switch "
                    f"at {self.given_chunks} or later",
                    field="prompt_switch",
                )
            if not before < switch.chunk < self.chunks:
                raise ConfigError(
                    f"a prompt switch is at chunk {switch.chunk}, but must be after chunk {before} and before chunk "
                    f"{self.chunks}, the end; chunks count from 0",
                    field="prompt_switch",
                )
            if switch.policy in RECACHES and self.kv_context in PER_STEP:
                raise ConfigError(
                    f"prompt switch {switch.policy} needs a KV context with a clean pass: clean or staircase",
                    field="kv_context",
                )
            if self.mix > 1:
                self._check_mixed(switch)
            before = switch.chunk

    @property
    def given_chunks(self) -> int:
        return 0 if self.given_latents is None else len(self.given_latents)

    def inputs_from(self, spec: ModelSpec, first: int) -> StreamInputs:
        """Noise and input of the stream that begins at chunk `first`: the noise is its own seed's, or what is given
        from there on."""
        noise: Noise = SeededNoise(spec.chunk_shape, self.seed)
        if self.initial is not None:
            renoise = None if self.renoise is None else self.renoise[first:]
            noise = TensorNoise(self.initial[first:], renoise, self.schedule, noise)
        levels = None if self.levels is None else self.levels.starting_at(first)
        return StreamInputs(noise, self._source(spec, first), levels)

    def _source(self, spec: ModelSpec, first: int) -> InitLatents | None:
        """The encoded input of the stream that begins at chunk `first`."""
        if self.video is None:
            return None
        video, strength = self.video[first:], self._strength
        if self.motion_noise:
            motion = None if self.motion is None else self.motion[first:]
            return InitLatents.following_motion(video, strength, spec.first_chunks, motion)
        timestep = self.schedule.timesteps[0] if self.strength is None else TIMESTEPS * strength
        steady = InitLatents.steady(video, strength, timestep)
        return steady if self.noise_level is None else replace(steady, noise_level=self.noise_level[first:])

    @property
    def _strength(self) -> float:
        return self.schedule.sigmas[0] if self.strength is None else self.strength

    def _check_video(self) -> None:
        if self.video is None:
            return
        if len(self.video) < self.chunks:
            raise ConfigError(
                f"the input video has {len(self.video)} chunks, but {self.chunks} are to be made", field="video_latents"
            )
        if self.noise_level is not None:
            return
        least = self._strength - (REACH + TIMESTEP_OFFSET + 1 / TIMESTEPS if self.motion_noise else 0)
        following = [levels.sigmas[1] for levels in (self.schedule, self.schedule.of(0)) if levels.steps > 1]
        if not max(following, default=0) < least <= self._strength <= 1:
            motion = f", of which motion takes up to {REACH + TIMESTEP_OFFSET:g}" if self.motion_noise else ""
            raise ConfigError(
                f"strength is {self._strength:g}{motion}; it must be at most 1, and above the noise level of the "
                f"second step, {max(following, default=0):g}",
                field="strength",
            )

    def _check_mixed(self, switch: PromptSwitch) -> None:
        """Raises ConfigError for a switch that cannot take several chunks."""
        if switch.policy not in MIXED:
            raise ConfigError(
                f"prompt switch {switch.policy} forgets what was before it, so there is nothing to mix with; a "
                f"prompt mix goes with {' or '.join(MIXED)}",
                field="prompt_mix",
            )
        if len(switch.embeddings) != len(self.embeddings):
            raise ConfigError(
                f"prompt embeddings of {len(self.embeddings)} and of {len(switch.embeddings)} rows cannot be mixed; "
                "pad them to the same number, as the model's text encoder does",
                field="prompt_mix",
            )

    def _single(self) -> list[PromptSwitch]:
        """The prompt changes by chunk: one that takes several chunks (`mix`) as one change per chunk."""
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
    def segments(self) -> list[tuple[PromptSwitch, list[PromptSwitch], int]]:
        """The run cut at its resets: how each stream begins, its other prompt changes, and the chunk where it ends."""
        begins = [
            PromptSwitch(0, self.embeddings, "reset"),
            *(each for each in self.switches if each.policy == "reset"),
        ]
        ends = [begin.chunk for begin in begins[1:]] + [self.chunks]
        return [
            (begin, [each for each in self._single() if begin.chunk < each.chunk < end], end)
            for begin, end in zip(begins, ends, strict=True)
        ]


def run_reference(
    ring: Ring, run: ReferenceRun, check: Callable[[], None] = lambda: None
) -> Iterator[tuple[Tensor, bool]]:
    """The latents `[C, F, h, w]` of each chunk, in order, and whether it is the first chunk of a stream. `check` is
    called between turns of a ring over processes, and ends the run by what it raises. Mutates: ring.

    Raises:
        ConfigError: see `check_together`.
        ValueError: an unknown KV context, or one that the schedule does not go with.
    """
    spec, epochs = ring.sampler.spec, count(1)
    check_together(run, spec.first_chunks)
    for begin, switches, end in run.segments:
        inputs, length = run.inputs_from(spec, begin.chunk), end - begin.chunk
        if begin.chunk == 0:
            ring.open(
                _NAME, begin.embeddings, epoch=0, steps=run.schedule, kv_context=run.kv_context,
                start=run.given_latents, given=inputs,
            )  # fmt: skip
        else:
            ring.reset(_NAME, begin.embeddings, epoch=next(epochs), given=inputs)
        known = ring.scheduler.next_chunk(_NAME)
        for chunk in range(known):
            assert run.given_latents is not None
            yield run.given_latents[chunk], chunk == 0
        if known == length:
            continue
        while not ring.scheduler.drained(_NAME):  # what is given is seen under the prompt that the stream begins with
            check()
            ring.step_latents(_WAIT_S)
        due = {switch.chunk - begin.chunk: switch for switch in switches}
        done: dict[int, Tensor] = {}
        for chunk in range(known, length):
            while chunk not in done:
                following = ring.scheduler.next_chunk(_NAME)
                if (switch := due.pop(following, None)) is not None:
                    ring.set_conditioning(_NAME, switch.embeddings, epoch=next(epochs), switch=switch.policy)
                # Steps of a staircase wait for chunks that come after; those made for this alone are dropped.
                wanted = following < length or run.kv_context == "staircase"
                ring.scheduler.set_frame_credit(_NAME, spec.admitted_frames(following) if wanted else 0)
                check()
                rows, finished = ring.step_latents(_WAIT_S)
                assert rows or finished or ring.has_work, "the stream stands still"
                done |= {row.chunk: latents for row, latents in finished}
            yield done.pop(chunk), chunk == 0


def check_together(run: ReferenceRun, count: int) -> None:
    """Raises ConfigError if a stream's end, a prompt switch, or the end of given latents falls within its first `count`
    chunks, which are made together."""
    if 0 < run.given_chunks < count:
        raise ConfigError(
            f"{run.given_chunks} chunks are given, but the first {count} are made together; give none, or at least "
            f"{count}",
            field="given_latents",
        )
    for begin, switches, end in run.segments:
        if end - begin.chunk < count:
            raise ConfigError(
                f"a stream from chunk {begin.chunk} to {end} has {end - begin.chunk} chunks, but the first {count} are "
                f"made together; make at least {count}",
                field="chunks",
            )
        for switch in switches:
            if switch.chunk - begin.chunk < count:
                raise ConfigError(
                    f"a prompt switch is at chunk {switch.chunk}, but the first {count} chunks from {begin.chunk} on "
                    f"are made together; switch at {begin.chunk + count} or later",
                    field="prompt_switch",
                )
