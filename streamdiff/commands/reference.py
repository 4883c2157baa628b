"""A reference run from files: what `streamdiff generate` does with the options of `ReferenceJob`.

The model is planned, loaded and split over ranks as that of a live stream, but what the job says goes before its own
facts; `reference_run` makes the latents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.commands.jobs import ReferenceJob
from streamdiff.commands.reference_run import PromptSwitch, ReferenceRun, check_together, run_reference
from streamdiff.core import PROMPT_POLICIES
from streamdiff.device import own_device
from streamdiff.errors import ConfigError
from streamdiff.models import sampling, tensor_file
from streamdiff.models.autoencoder.autoencoder import load_decoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.headers import MOTION, NORMALISED, parse_header, read_motion
from streamdiff.models.loader import ModelLoader, load_text_encoder
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.sampling import Schedule
from streamdiff.models.spec import ModelSpec, choose_steps, with_window
from streamdiff.models.tensor_file import read_first_steps
from streamdiff.models.weight_files import read_object
from streamdiff.pipeline import rank_process
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.load_plan import LoadPlan
from streamdiff.pipeline.planner.model_sizes import sizes_from
from streamdiff.pipeline.planner.partition import check_ranks, split_evenly
from streamdiff.pipeline.ring import Ring, local_parts
from streamdiff.pipeline.runner.init_latents import levels_of
from streamdiff.pipeline.runner.sampler import StepLevels
from streamdiff.pipeline.worker_group import WorkerGroup
from streamdiff.video import files


@torch.inference_mode()
def run(job: ReferenceJob) -> int:
    """Make the latents, and the video unless that is not wanted; returns the exit status.

    Raises:
        ConfigError: what was asked for cannot be done; nothing is written then.
    """
    plan, reference = prepare(job)
    model, spec, text = plan.models.model, plan.spec, None
    if job.prompt_embeds is None:
        text = load_text_encoder(model, job.model, spec.text_shape, plan.device)
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        ring, check = stack.enter_context(_ring(plan, job.model.stages))
        if text is not None:
            reading = text.read(job.prompt, None)
            if reading.notice:
                print(reading.notice)
            reference = replace(reference, embeddings=text.encode(reading.text))
        decoder = None if job.no_decode else PictureDecoder(load_decoder(model.found_vae, plan.device))
        bar = stack.enter_context(tqdm(total=reference.chunks, unit="chunk", dynamic_ncols=True))
        writer = None
        if job.latents_out is not None:
            facts = {"model": job.model.name, "kv_context": job.model.kv_context}
            about = {**NORMALISED, **facts, "timesteps": str(reference.schedule.timesteps)}
            writer = stack.enter_context(tensor_file.writing(job.latents_out, "latents", spec.chunk_shape, about))
        chunks = _written(run_reference(ring, reference, check), writer, bar)
        if decoder is not None and job.output is not None:
            files.write_video(job.output, _frames(chunks, decoder), job.fps or spec.native_fps)
        else:
            deque(chunks, maxlen=0)
    for path in filter(None, (job.latents_out, job.output if decoder is not None else None)):
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
    if started.context is None:
        parts = parts if stages == 1 else local_parts(model, plan.device, stages)
        yield Ring(model, plan.device, parts=parts), lambda: None
        return
    ring, workers = Ring(model, plan.device, parts=parts), WorkerGroup(started.context, plan.config.watchdog_s)
    workers.start(ring, lambda: None)
    try:
        yield ring, workers.check
    except LinkClosed as error:
        raise workers.broken(error) from error
    workers.leave()


def _written(
    chunks: Iterator[tuple[Tensor, bool]], writer: tensor_file.TensorWriter | None, bar: tqdm[NoReturn]
) -> Iterator[tuple[Tensor, bool]]:
    """`chunks` (see `run_reference`) as they come, written and counted. Mutates: writer, bar."""
    for latents, begins in chunks:
        if writer is not None:
            writer.add(latents)
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
    if job.latents_out is None and (job.output is None or job.no_decode):
        raise ConfigError("nothing would be written; give --latents-out FILE, or --output FILE without --no-decode")
    if job.chunks is None:
        raise ConfigError("--chunks is missing: how many chunks to make; for example --chunks 8")
    if job.first_steps is not None and (job.strength is not None or job.motion_noise):
        raise ConfigError(
            "--first-steps says noise level and timestep of every chunk; leave --strength and --motion-noise out"
        )
    if job.video_latents is None and (job.strength is not None or job.motion_noise):
        raise ConfigError("--strength and --motion-noise say how input is mixed with noise; give it as --video-latents")
    for option, is_given in (("--context-alone", job.context_alone), ("--context-pictures", job.context_pictures)):
        if is_given and job.model.kv_context == "same_step":
            raise ConfigError(f"{option} is about the clean pass, which KV context same_step does not have")
    if job.prompt_mix is not None and not job.prompt_switch:
        raise ConfigError("--prompt-mix says over how many chunks a --prompt-switch comes; there is none")
    if job.chunks < 1:
        raise ConfigError(f"--chunks is {job.chunks}; at least 1 is needed")
    if job.processes and job.model.stage_ranks == 1:
        raise ConfigError("--processes gives each of several stages a process; --stages is 1")
    if job.model.shares > 1 and not job.processes:
        raise ConfigError(f"--parallel is {job.model.parallel}: ranks that share a stage need --processes")
    if job.no_decode and job.output is not None:
        raise ConfigError("--no-decode makes latents only, so there is nothing to write to --output; leave one out")
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
    loader = ModelLoader(config, own_device(config.device), job.container, architecture)
    spec = _spec_of(job, loader.spec)
    schedule = _schedule(job, loader.model, spec)
    if schedule.first is not None and spec.first_chunks > 1:
        raise ConfigError(
            f"the first chunk has {schedule.first.steps} steps, and it is longer than the others; a model with both is "
            "not built. Leave --first-chunk-steps out, or say --first-chunk-frames "
            f"{spec.chunk_latents}"
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
    shifts = job.warp or job.nearest
    if job.model.timesteps is None:
        if shifts or any(each is not None for each in (job.sigmas, job.first_chunk_steps, job.shift)):
            raise ConfigError(
                "--sigmas, --shift, --warp, --nearest and --first-chunk-steps go with a list: --steps 1000,750,500,250"
            )
        if not spec.steps:
            raise ConfigError("--steps is missing: the timesteps the model is told, for example 1000,937.5,833.33,625")
        return spec.schedule(choose_steps(job.model.step_count, spec.steps, model.name))
    if job.sigmas is not None and (shifts or job.shift is not None):
        raise ConfigError("--sigmas says the noise levels, so leave --shift, --warp and --nearest out")
    if job.shift is not None and not shifts:
        raise ConfigError(
            "--shift is for lists that are meant before it: add --warp, or --nearest if noise levels are looked up, or "
            "leave it out"
        )
    shift = 1.0 if job.shift is None else job.shift
    listed = partial(sampling.published, shift=shift, warp=job.warp, nearest=job.nearest)
    steps, sigmas = job.model.timesteps, job.sigmas
    schedule = listed(steps) if sigmas is None else sampling.from_timesteps(steps, sigmas)
    return schedule if job.first_chunk_steps is None else replace(schedule, first=listed(job.first_chunk_steps))


def _spec_of(job: ReferenceJob, spec: ModelSpec) -> ModelSpec:
    """`spec` with the sizes, window, sink, positions and context noise that were asked for."""
    assert job.chunks is not None
    chunk, height, width = spec.chunk_latents, spec.latent_height, spec.latent_width
    given = [(job.noise, "initial"), (job.video_latents, "latents"), (job.given_latents, "latents")]
    shapes = [(path, _shape(path, name)) for path, name in given if path is not None]
    chunk = job.chunk_latents or next((shape[2] for _, shape in shapes if len(shape) == 5), chunk)
    for path, shape in shapes[::-1]:  # the first one says the size; that the others agree is checked as they are read
        if len(shape) in (4, 5):
            if job.model.size is not None and shape[-2:] != (spec.latent_height, spec.latent_width):
                raise ConfigError(f"--size is {job.model.size}, but {path} is for another; leave --size out")
            height, width = shape[-2:]
    first = job.first_chunk_latents or (spec.first_chunks * chunk if chunk == spec.chunk_latents else chunk)
    text = () if job.prompt_embeds is None else _shape(job.prompt_embeds, "prompt_embeds")
    if not (spec.sink_latents if job.sink is None else job.sink):  # nothing is done with a sink that is not there
        spec = replace(spec, adaptive_sink=None, averaged_sink=None)
    overrides = {"adaptive_sink", "averaged_sink", "context_alone", "context_pictures"}
    said = job.model_dump(include=overrides, exclude_none=True)
    if job.context_noise is not None:
        said["context_sigma"] = job.context_noise / sampling.TIMESTEPS
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
    if chunk < 1:
        raise ConfigError(f"--chunk-frames is {chunk}; at least 1 is needed")
    if first < 1 or first % chunk:
        raise ConfigError(
            f"--first-chunk-frames is {first}; a first chunk is made of chunks, so it must be a multiple of "
            f"the others' {chunk} latent frames"
        )
    if first > chunk * chunks:
        raise ConfigError(
            f"--chunks is {chunks}, but the first chunk, of {first} latent frames, is made of {first // chunk}; "
            "make at least as many"
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
    embeddings = torch.zeros(spec.text_shape)
    if job.prompt_embeds is not None:
        embeddings = tensor_file.read_rows(job.prompt_embeds, spec.text_shape)
    if job.first_steps is not None:
        with_video = job.video_latents is not None
        first = read_first_steps(
            job.first_steps, spec.chunk_latents, steps=steps, chunks=job.chunks, with_video=with_video
        )
        sigmas, noise_level = first.sigmas, first.noise_level
        if sigmas is None:
            sigmas = levels_of(first.timesteps.flatten(), schedule).view_as(first.timesteps)
        levels = StepLevels(first.timesteps, sigmas)
    return ReferenceRun(
        embeddings,
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
        motion=_read_motion(job, spec),
        mix=1 if job.prompt_mix is None else job.prompt_mix,
    )


def _read_chunks(path: Path, spec: ModelSpec) -> Tensor:
    """Latents `[n, C, F, h, w]` of a file that has them so, or as a clip: what is left over of a last chunk is not
    used, as chunks that are not asked for."""
    latents = tensor_file.read_latents(path, spec.chunk_shape, whole=True)
    if latents.ndim == 4:
        count = latents.shape[1] // spec.chunk_latents
        latents = latents[:, : count * spec.chunk_latents].unflatten(1, (count, spec.chunk_latents)).transpose(0, 1)
    return latents


def _read_given(path: Path, spec: ModelSpec) -> Tensor:
    """Latents to go on from; ConfigError where they are no whole number of chunks."""
    latents, shape = _read_chunks(path, spec), _shape(path, "latents")
    if len(shape) == 4 and shape[1] % spec.chunk_latents:
        raise ConfigError(
            f"{path}: latents has {shape[1]} latent frames, but a stream goes on from whole chunks; cut it to a "
            f"multiple of {spec.chunk_latents}, or say --chunk-frames"
        )
    return latents


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
