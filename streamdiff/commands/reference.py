"""A reference run (`streamdiff generate` with the options of `ReferenceJob`): a reproducible stream from given
conditioning, noise, schedule and prompt changes, to compare its latents with another implementation.

The model is planned, loaded and split over ranks as that of a live stream, but what the job says goes before its own
facts. The latents are a function of weights and `ReferenceRun` alone, on any number of stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.commands.jobs import ReferenceJob
from streamdiff.core import PER_STEP, PROMPT_POLICIES, RECACHES
from streamdiff.device import own_device
from streamdiff.errors import ConfigError
from streamdiff.models import sampling, tensor_file
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.headers import MOTION, NORMALISED, parse_header, read_motion
from streamdiff.models.loader import PARTS, ModelLoader, load_text_encoder
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.sampling import TIMESTEPS, Schedule
from streamdiff.models.spec import ModelSpec, choose_steps, context_fault, with_window
from streamdiff.models.tensor_file import read_first_steps
from streamdiff.models.transformer.weights import takes_picture_only
from streamdiff.models.weight_files import read_object
from streamdiff.pipeline import rank_process
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.load_plan import LoadPlan
from streamdiff.pipeline.planner.model_sizes import sizes_from
from streamdiff.pipeline.planner.partition import check_ranks, split_evenly
from streamdiff.pipeline.ring import Ring, local_parts
from streamdiff.pipeline.runner.controls import tracked_rows
from streamdiff.pipeline.runner.init_latents import REACH, TIMESTEP_OFFSET, InitLatents, levels_of
from streamdiff.pipeline.runner.sampler import Noise, StepLevels, StreamInputs
from streamdiff.pipeline.worker_group import WorkerGroup
from streamdiff.video import files

MIXED = ("keep", *RECACHES)
"""Policies of a prompt that may come little by little: the others forget what was before it."""
_NAME, _WAIT_S = 0, 1.0  # seconds for ranks that are other processes, between two looks whether all is well


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
    rest, by linear interpolation; one that comes meanwhile continues from there. Krea's way: `release_server.py` of
    github.com/krea-ai/realtime-video takes the shares 0, 1/3, 2/3 and 1, so a mix of 3 from the second of the chunks.

    `video` `[n, C, F, h, w]` is encoded input that chunks start from, mixed with noise by `strength`, 0 to 1 (None: the
    first level of the schedule); with `motion_noise` that is the most, and motion lowers it (see `init_latents`), that
    of the pixels if it is known: `motion` `[n]`, the largest difference of a chunk's neighbouring frames. `noise_level`
    `[n, F]` says it by latent frame instead. `levels` go before the schedule's for the steps that they have.

    `given_latents` `[n, C, F, h, w]` are finished latents of the first n chunks, from which it continues: with a
    clean pass they get that alone, at timestep 0 and without noise (Self-Forcing's `initial_latent`); in `same_step`
    each step sees them at its own noise level.

    `condition` `[channels, n, h, w]` is what the picture that each stream begins with is, as of `SamplerState`;
    `controls` `[n, ...]` is what steers each chunk, as of `StreamInputs`.

    Raises:
        ConfigError: a switch that is out of order, outside the stream or among the chunks that are given; one that
            cannot be mixed, for its policy or since its embeddings have another number of rows; a strength that the
            schedule cannot continue from; no chunk to make but those that are given.
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
    condition: Tensor | None = None
    controls: Tensor | None = None
    mix: int = 1

    def __post_init__(self) -> None:
        self._check_video()
        given, before = self.given_chunks, 0
        nothing = f"chunks is {self.chunks}, and the first {given} are given, so there is none to make"
        _refuse_if(given >= self.chunks, nothing, "chunks")
        for switch in self.switches:
            _refuse_if(
                not max(before + 1, given) <= switch.chunk < self.chunks,
                f"a prompt switch is at chunk {switch.chunk}, but must be after chunk {before} and the {given} "
                f"that are given, and before chunk {self.chunks}, the end; chunks count from 0",
                "prompt_switch",
            )
            _refuse_if(
                switch.policy in RECACHES and self.kv_context in PER_STEP,
                f"prompt switch {switch.policy} needs a KV context with a clean pass: clean or staircase",
                "kv_context",
            )
            rows = len(self.embeddings), len(switch.embeddings)
            _refuse_if(
                self.mix > 1 and (switch.policy not in MIXED or rows[0] != rows[1]),
                f"prompt switch {switch.policy} to {rows[1]} rows of embeddings cannot be mixed with those before: a "
                f"prompt mix goes with {' or '.join(MIXED)}, and {rows[0]} rows, as the text encoder pads them",
                "prompt_mix",
            )
            before = switch.chunk

    @property
    def given_chunks(self) -> int:
        return 0 if self.given_latents is None else len(self.given_latents)

    def inputs_from(self, spec: ModelSpec, first: int) -> StreamInputs:
        """Noise and input of the stream that begins at chunk `first`: the noise is its own seed's, or what is given
        from there on."""
        initial, renoise = (None if each is None else each[first:] for each in (self.initial, self.renoise))
        noise = Noise(spec.chunk_shape, self.seed, initial, renoise, self.schedule)
        levels = self.levels and StepLevels(self.levels.timesteps[first:], self.levels.sigmas[first:])
        controls = None if self.controls is None else self.controls[first:]
        return StreamInputs(noise, self._source(spec, first), levels, self.condition, controls)

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
        short = f"the input video has {len(self.video)} chunks, but {self.chunks} are to be made"
        _refuse_if(len(self.video) < self.chunks, short, "video_latents")
        if self.noise_level is not None:
            return
        least = self._strength - (REACH + TIMESTEP_OFFSET + 1 / TIMESTEPS if self.motion_noise else 0)
        following = [levels.sigmas[1] for levels in (self.schedule, self.schedule.of(0)) if levels.steps > 1]
        motion = f", of which motion takes up to {REACH + TIMESTEP_OFFSET:g}" if self.motion_noise else ""
        _refuse_if(
            not max(following, default=0) < least <= self._strength <= 1,
            f"strength is {self._strength:g}{motion}; it must be at most 1, and above the noise level of the second "
            f"step, {max(following, default=0):g}",
            "strength",
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
        resets = [each for each in self.switches if each.policy == "reset"]
        begins = [PromptSwitch(0, self.embeddings, "reset"), *resets]
        ends = [*(begin.chunk for begin in resets), self.chunks]
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
    places = [("given_latents", run.given_chunks)] if run.given_chunks else []
    for begin, switches, end in run.segments:
        places += [("chunks", end - begin.chunk), *(("prompt_switch", each.chunk - begin.chunk) for each in switches)]
    for name, place in places:
        _refuse_if(
            place < count,
            f"the first {count} chunks of a stream are made together, and {name} would part them at {place}; take "
            f"{count} or more",
            name,
        )


def _refuse_if(fault: object, why: str, field: str = "") -> None:
    """Raises ConfigError where there is a fault."""
    if fault:
        raise ConfigError(why, field=field)


# ---- from files ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def run(job: ReferenceJob) -> int:
    """Make the latents, and the video unless that is not wanted; returns the exit status.

    Raises:
        ConfigError: what was asked for cannot be done; nothing is written then.
    """
    plan, reference = prepare(job)
    model, spec, text = plan.models.model, plan.spec, None
    if job.prompt_embeds is None and job.image_features is None:
        text = load_text_encoder(model, job.model, spec.text_shape, plan.device)
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        ring, check = stack.enter_context(_ring(plan, job.model.stages))
        if text is not None:
            reading = text.read(job.prompt, None)
            if reading.notice:
                print(reading.notice)
            reference = replace(reference, embeddings=text.encode(reading.text))
        bar = stack.enter_context(tqdm(total=reference.chunks, unit="chunk", dynamic_ncols=True))
        write = None
        if job.latents_out is not None:
            facts = {"model": job.model.name, "kv_context": job.model.kv_context}
            about = {**NORMALISED, **facts, "timesteps": str(reference.schedule.timesteps)}
            shape = reference.chunks, *spec.chunk_shape
            write = stack.enter_context(tensor_file.writing(job.latents_out, "latents", shape, about))
        chunks = _written(run_reference(ring, reference, check), write, bar)
        if job.output is None:
            deque(chunks, maxlen=0)
        else:
            space = plan.config.latent_space
            decoder = PictureDecoder(load_autoencoder(model.found_vae, "decoder", plan.device, latent_space=space))
            files.write_video(job.output, _frames(chunks, decoder), job.fps or spec.native_fps)
    for path in filter(None, (job.latents_out, job.output)):
        print(f"{path}: {reference.chunks} chunks of {spec.chunk_latents} latent frames")
    return 0


def follow(job: ReferenceJob) -> None:
    """Run a rank other than 0 until the ring ends. Raises ConfigError as `plan_of`, and for ranks that differ."""
    rank_process.run_rank(plan_of(job))


@contextmanager
def _ring(plan: LoadPlan, stages: int) -> Iterator[tuple[Ring, Callable[[], None]]]:
    """The loaded ring, all `stages` in this process unless `plan` is for several, and a check that raises where it is
    broken. Other ranks end with it.

    Raises:
        ConfigError: parts that are missing or do not fit, or ranks that are not alike.
        EngineFailure: a rank that does not come, or ends before its time.
    """
    started = rank_process.start_rank(plan, plan.join())
    model, parts = started.head
    if started.watch.context is None:
        parts = parts if stages == 1 else local_parts(model, plan.device, stages)
        yield Ring(model, plan.device, parts=parts), lambda: None
        return
    ring, workers = Ring(model, plan.device, parts=parts), WorkerGroup(started.watch, plan.config.watchdog_s)
    workers.start(ring, lambda: None)
    try:
        yield ring, workers.check
    except LinkClosed as error:
        raise workers.broken(error) from error
    workers.leave()


def _written(
    chunks: Iterator[tuple[Tensor, bool]], write: Callable[[Tensor], None] | None, bar: tqdm[NoReturn]
) -> Iterator[tuple[Tensor, bool]]:
    """`chunks` (see `run_reference`) as they come, each given to `write`, and counted. Mutates: bar."""
    for latents, begins in chunks:
        if write is not None:
            write(latents)
        yield latents, begins
        bar.update()


def _frames(chunks: Iterator[tuple[Tensor, bool]], decoder: PictureDecoder) -> Iterator[NDArray[np.uint8]]:
    """Frames uint8 `[H, W, 3]` of `chunks`; a fresh stream begins with a fresh decoder state."""
    memory = decoder.new_memory()
    for latents, begins in chunks:
        memory = decoder.new_memory() if begins else memory
        for latent in latents.split(1, 1):  # a chunk may be a whole clip
            yield from decoder.decode(latent[None], memory).cpu().numpy()


# ---- what was asked for -------------------------------------------------------------------------------------------


def prepare(job: ReferenceJob) -> tuple[LoadPlan, ReferenceRun]:
    """Validate `job`, plan what is loaded, and read its inputs, before any weights are loaded. The embeddings of a
    prompt that has to be encoded are zeros here.

    Raises:
        ConfigError: see `run`.
    """
    _check(job)
    plan = plan_of(job)
    reference = _read_inputs(job, plan)
    check_together(reference, plan.spec.first_chunks)
    return plan, reference


def _check(job: ReferenceJob) -> None:
    """Check everything that can be checked before anything is loaded."""
    model, mixes = job.model, job.strength is not None or job.motion_noise
    has_clean_pass, has_video = model.kv_context != "same_step", job.output is not None
    _refuse_if(
        job.latents_out is None and (not has_video or job.no_decode),
        "nothing would be written; give --latents-out FILE, or --output FILE without --no-decode",
    )
    _refuse_if(job.chunks is None, "--chunks is missing: how many chunks to make; for example --chunks 8")
    levels = "--first-steps says noise level and timestep of every chunk; leave --strength and --motion-noise out"
    _refuse_if(job.first_steps is not None and mixes, levels)
    mixed = "--strength and --motion-noise say how input is mixed with noise; give it as --video-latents"
    _refuse_if(job.video_latents is None and mixes, mixed)
    for option, is_given in (("--context-alone", job.context_alone), ("--context-pictures", job.context_pictures)):
        clean = f"{option} is about the clean pass, which KV context same_step does not have"
        _refuse_if(is_given and not has_clean_pass, clean)
    switch = "--prompt-mix says over how many chunks a --prompt-switch comes; there is none"
    _refuse_if(job.prompt_mix is not None and not job.prompt_switch, switch)
    alone = "--processes gives each of several stages a process; --stages is 1"
    _refuse_if(job.processes and model.stage_ranks == 1, alone)
    shared = f"--parallel is {model.parallel}: ranks that share a stage need --processes"
    _refuse_if(model.shares > 1 and not job.processes, shared)
    latents = "--no-decode makes latents only, so there is nothing to write to --output; leave one out"
    _refuse_if(job.no_decode and has_video, latents)
    if job.latents_out is not None:
        tensor_file.check_target(job.latents_out, job.overwrite)
    if job.output is not None:
        files.check_target(job.output, job.overwrite)


# ---- its model ----------------------------------------------------------------------------------------------------


def plan_of(job: ReferenceJob) -> LoadPlan:
    """What each rank loads for `job`: of the steps of its spec there is one schedule, and stages that take turns in
    this process are one rank. Reads headers and configurations, no weights.

    Raises:
        ConfigError: no such model, files that cannot be read, invalid sizes, more stages than blocks.
    """
    config = job.model.model_copy(update={"decode_rank": "head", "compile": "off"})
    if config.attention == "auto":
        config = config.model_copy(update={"attention": "sdpa"})
    if not job.processes:
        config = config.model_copy(update={"stages": 1, "threads": torch.get_num_threads()})
    architecture = None if job.architecture is None else read_object(job.architecture)
    loader = ModelLoader(config, own_device(config.device), architecture)
    spec = _spec_of(job, loader.spec)
    _refuse_if(fault := context_fault(spec, config.kv_context), fault or "", "kv_context")
    used = {"vae": not job.no_decode, "text_encoder": job.prompt_embeds is None}
    loader.check_files(*(part for part in PARTS if used.get(part, True)))
    schedule = _schedule(job, loader.model, spec)
    _refuse_if(
        schedule.first is not None and spec.first_chunks > 1,
        "the first chunk has steps of its own, and it is longer than the others; a model with both is not built. Leave "
        f"--first-chunk-steps out, or say --first-chunk-frames {spec.chunk_latents}",
    )
    spec = replace(spec, steps=(schedule.steps,), schedules=(schedule,))
    notes = tuple(_notes(job, loader.model))
    sizes = sizes_from(loader.checkpoint.architecture, spec)
    check_ranks(job.model, sizes)
    runs = split_evenly(sizes.blocks, config.stages)
    return LoadPlan(config, loader, sizes, schedule.steps, (), notes, False, None, 1, runs, reference=True)


def _notes(job: ReferenceJob, model: ResolvedModel) -> Iterator[str]:
    """What a user should know before the run. Raises ConfigError for unnormalised latents, unless the model's authors
    use such, or the catalogue does not have the model."""
    for path in (job.video_latents, job.given_latents):
        if path is None or not path.exists() or not tensor_file.is_raw(path):
            continue
        if model.entry is not None and model.entry.encode_normalised is not False:
            raise ConfigError(
                f"{path}: its latents are not normalised, and {model.name} knows normalised ones; encode it without "
                "--raw"
            )
        yield f"{path}: its latents are not normalised, and are used as they are"
    if job.motion_noise and (video := job.video_latents) is not None and MOTION not in parse_header(video).metadata:
        yield (
            f"{video} does not say how its pixels move, as files of `streamdiff encode` do; the motion of its latents "
            "counts"
        )
    if job.video_latents is None and job.noise is None and model.noise_note:
        yield model.noise_note


def _schedule(job: ReferenceJob, model: ResolvedModel, spec: ModelSpec) -> Schedule:
    """The denoise steps: those given, else the model's own."""
    steps, sigmas, shifts = job.model.timesteps, job.sigmas, job.warp or job.nearest
    if steps is None:
        _refuse_if(
            shifts or any(each is not None for each in (sigmas, job.renoise_sigmas, job.first_chunk_steps, job.shift)),
            "--sigmas, --renoise-sigmas, --shift, --warp, --nearest and --first-chunk-steps go with a list: --steps "
            "1000,750,500,250",
        )
        _refuse_if(
            not spec.steps, "--steps is missing: the timesteps the model gets, for example 1000,937.5,833.33,625"
        )
        return spec.schedule(choose_steps(job.model.step_count, spec.steps, model.name))
    _refuse_if(
        sigmas is not None and (shifts or job.shift is not None),
        "--sigmas says the noise levels, so leave --shift, --warp and --nearest out",
    )
    _refuse_if(
        job.shift is not None and not shifts,
        "--shift is for lists that are meant before it: add --warp, or --nearest if noise levels are looked up, or "
        "leave it out",
    )
    shift = 1.0 if job.shift is None else job.shift
    listed = partial(sampling.published, shift=shift, warp=job.warp, nearest=job.nearest)
    schedule = listed(steps) if sigmas is None else sampling.from_timesteps(steps, sigmas)
    if job.renoise_sigmas is not None:
        schedule = replace(schedule, renoise=sampling.without_end(job.renoise_sigmas))
    return schedule if job.first_chunk_steps is None else replace(schedule, first=listed(job.first_chunk_steps))


def _spec_of(job: ReferenceJob, spec: ModelSpec) -> ModelSpec:
    """`spec` with the sizes, window, sink, positions and context noise that were asked for."""
    assert job.chunks is not None
    chunk, height, width = spec.chunk_latents, spec.latent_height, spec.latent_width
    given = [(job.noise, "initial"), (job.video_latents, "latents"), (job.given_latents, "latents")]
    given += [(job.condition, "latents")]
    shapes = [(path, _shape(path, name)) for path, name in given if path is not None]
    chunk = job.chunk_latents or next((shape[2] for _, shape in shapes if len(shape) == 5), chunk)
    for path, shape in shapes[::-1]:  # the first one says the size; that the others agree is checked as they are read
        if len(shape) in (4, 5):
            if job.model.size is not None and shape[-2:] != (spec.latent_height, spec.latent_width):
                raise ConfigError(f"--size is {job.model.size}, but {path} is for another; leave --size out")
            height, width = shape[-2:]
    first = job.first_chunk_latents or (spec.first_chunks * chunk if chunk == spec.chunk_latents else chunk)
    text = () if job.prompt_embeds is None else _shape(job.prompt_embeds, "prompt_embeds")
    text = text if job.image_features is None else _shape(job.image_features, "clip_features")
    if not (spec.sink_latents if job.sink is None else job.sink):  # nothing is done with a sink that is not there
        spec = replace(spec, adaptive_sink=None, averaged_sink=None)
    overrides = {"adaptive_sink", "averaged_sink", "context_alone", "context_pictures"}
    said = job.model_dump(include=overrides, exclude_none=True)
    if job.context_noise is not None:
        said["context_sigma"] = job.context_noise / TIMESTEPS
    if job.model.kv_context == "same_step":  # without a clean pass
        said["context_pictures"] = False
    spec = replace(
        spec,
        chunk_latents=chunk,
        latent_height=height,
        latent_width=width,
        height=height * spec.height // spec.latent_height,
        width=width * spec.width // spec.latent_width,
        first_chunks=_first_chunks(first, chunk, job.chunks),
        text_shape=(text[-2] if len(text) in (2, 3) else spec.text_shape[0], spec.text_shape[1]),
        **said,
    )
    window = job.window
    if not (spec.window_latents if window is None else window):  # all of it
        window = chunk * job.chunks
    return with_window(spec, window, job.sink, job.rope)


def _first_chunks(first: int, chunk: int, chunks: int) -> int:
    """Chunks that a stream's first one is made of, `first` latent frames."""
    _refuse_if(
        first % chunk,
        f"--first-chunk-frames is {first}; a first chunk is made of chunks, so it must be a multiple of the others' "
        f"{chunk} latent frames",
    )
    _refuse_if(
        first > chunk * chunks,
        f"--chunks is {chunks}, but the first chunk, of {first} latent frames, is made of {first // chunk}; make at "
        "least as many",
    )
    return first // chunk


def _shape(path: Path, name: str) -> tuple[int, ...]:
    """Shape of a tensor in a file; empty where it is not there, which is reported later."""
    entry = parse_header(path).entries.get(name) if path.exists() else None
    return () if entry is None else tuple(entry.shape)


# ---- its inputs ---------------------------------------------------------------------------------------------------


def _read_inputs(job: ReferenceJob, plan: LoadPlan) -> ReferenceRun:
    """Inputs of the run: reads the files, and checks them against the model."""
    assert job.chunks is not None
    spec, schedule = plan.spec, plan.spec.schedules[0]
    initial = renoise = levels = noise_level = None
    steps = schedule.of(0).steps
    if job.noise is not None:
        initial, renoise = tensor_file.read_noise(job.noise, spec.chunk_shape, steps=steps, chunks=job.chunks)
    if job.first_steps is not None:
        with_video = job.video_latents is not None
        first = read_first_steps(
            job.first_steps, spec.chunk_latents, steps=steps, chunks=job.chunks, with_video=with_video
        )
        timesteps, sigmas = first["timesteps"], first.get("sigmas")
        if sigmas is None:
            sigmas = levels_of(timesteps.flatten(), schedule).view_as(timesteps)
        levels, noise_level = StepLevels(timesteps, sigmas), first["noise_level"][:, 0] if with_video else None
    return ReferenceRun(
        _read_text(job, plan),
        job.chunks,
        schedule,
        kv_context=job.model.kv_context,
        seed=job.seed,
        initial=initial,
        renoise=renoise,
        switches=tuple(_switch(text, spec) for text in job.prompt_switch),
        video=None if job.video_latents is None else _read_chunks(job.video_latents, spec),
        strength=job.strength,
        motion_noise=job.motion_noise,
        noise_level=noise_level,
        levels=levels,
        given_latents=None if job.given_latents is None else _read_given(job.given_latents, spec),
        condition=_read_condition(job, spec),
        controls=_read_controls(job, spec),
        motion=_read_motion(job, spec),
        mix=1 if job.prompt_mix is None else job.prompt_mix,
    )


def _read_chunks(path: Path, spec: ModelSpec) -> Tensor:
    """Latents `[n, C, F, h, w]` of a file that has them so, or as a clip: what is left over of a last chunk is not
    used, as chunks that are not asked for."""
    latents = tensor_file.read_latents(path, spec.chunk_shape)
    if latents.ndim == 4:
        count = latents.shape[1] // spec.chunk_latents
        latents = latents[:, : count * spec.chunk_latents].unflatten(1, (count, spec.chunk_latents)).transpose(0, 1)
    return latents


def _read_given(path: Path, spec: ModelSpec) -> Tensor:
    """Latents to continue from; ConfigError where they are no whole number of chunks."""
    latents, shape = _read_chunks(path, spec), _shape(path, "latents")
    _refuse_if(
        len(shape) == 4 and shape[1] % spec.chunk_latents,
        f"{path}: latents is {list(shape)}, but a stream continues from whole chunks; cut it to a "
        f"multiple of {spec.chunk_latents}, or say --chunk-frames",
    )
    return latents


def _read_text(job: ReferenceJob, plan: LoadPlan) -> Tensor:
    """What cross-attention sees `[T, D]`; zeros where a prompt is still to be encoded. ConfigError where that is not
    what the model takes."""
    spec, pictured = plan.spec, takes_picture_only(plan.models.checkpoint.architecture)
    missing = f"--image-features is missing: {spec.name} has what CLIP sees in a picture in the prompt's place"
    _refuse_if(pictured and job.image_features is None, missing, "image_features")
    _refuse_if(pictured and job.prompt_embeds, f"--prompt-embeds: {spec.name} takes no prompt; leave it out")
    other = f"--image-features: {spec.name} takes a prompt in their place; leave it out"
    _refuse_if(not pictured and job.image_features, other, "image_features")
    if job.image_features is not None:
        return tensor_file.read_features(job.image_features, spec.text_shape[1])
    if job.prompt_embeds is not None:
        return tensor_file.read_rows(job.prompt_embeds, spec.text_shape)
    return torch.zeros(spec.text_shape)


def _read_condition(job: ReferenceJob, spec: ModelSpec) -> Tensor | None:
    """The picture's condition; ConfigError where the model takes one and none is given, or the other way round."""
    takes, name = spec.condition_channels, job.model.name
    other = f"--condition: {name} takes none, as it is no image-to-video model; leave it out"
    _refuse_if(job.condition is not None and not takes, other, "condition")
    missing = f"--condition is missing: {name} is an image-to-video model, which begins with a picture's latents"
    _refuse_if(job.condition is None and takes, missing, "condition")
    masks = takes - spec.latent_channels
    return None if job.condition is None else tensor_file.read_condition(job.condition, spec.chunk_shape, masks)


def _read_controls(job: ReferenceJob, spec: ModelSpec) -> Tensor | None:
    """What steers each chunk, `[chunks, *ModelSpec.steering_shape]`; ConfigError where the model cannot take it."""
    rows, sizes, frames = spec.action_rows, spec.actions, spec.chunk_latents
    if spec.has_camera:
        size, read = (spec.width, spec.height), tensor_file.read_cameras
        return None if job.controls is None else read(job.controls, frames, size, chunks=job.chunks or 1)
    if job.controls is None or rows is None or sizes is None:
        other = f"--controls: {spec.name} takes none; leave it out"
        _refuse_if(job.controls is not None, other, "controls")
        missing = f"--controls is missing: {spec.name} obeys what is pressed, and its keys are not in the catalogue"
        _refuse_if(rows is not None and len(spec.controls) != rows.width, missing, "controls")
        return None
    assert job.chunks is not None
    video = 1 + (job.chunks * frames - 1) * spec.frames_per_latent
    track = tensor_file.read_actions(job.controls, video, sizes.keyboard, sizes.mouse)
    return tracked_rows(track, job.chunks, frames, rows)


def _read_motion(job: ReferenceJob, spec: ModelSpec) -> Tensor | None:
    """Motion of each chunk of the video, float64 `[chunks]`, from its file's header; None if unused or not stored."""
    if not job.motion_noise or job.video_latents is None:
        return None
    if (motion_values := read_motion(parse_header(job.video_latents))) is None:
        return None
    motion = torch.tensor(motion_values, dtype=torch.float64)
    count = len(motion_values) // spec.chunk_latents
    return motion[: count * spec.chunk_latents].view(count, -1).amax(1)


def _switch(text: str, spec: ModelSpec) -> PromptSwitch:
    """`CHUNK:FILE[:POLICY]`; a file's name may have colons."""
    number, _, rest = text.partition(":")
    name, _, policy = rest.rpartition(":")
    if policy not in PROMPT_POLICIES or not name:
        name, policy = rest, "keep"
        if not Path(name).exists() and ":" in name:
            policies = ", ".join(PROMPT_POLICIES)
            raise ConfigError(f"--prompt-switch is {text!r}; there is no file {name}, and POLICY can be {policies}")
    if not (number.isascii() and number.isdecimal()) or not name:
        raise ConfigError(f"--prompt-switch is {text!r}; it must be CHUNK:FILE or CHUNK:FILE:POLICY")
    return PromptSwitch(int(number), tensor_file.read_rows(Path(name), spec.text_shape), policy)
