"""A reference run from files: what `streamdiff generate` does with the options of `cli.reference_options`.

Knows nothing about the command line. `reference_model` loads the model, `reference_run` makes the latents.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.commands import reference_model
from streamdiff.commands.reference_model import Found, ReferenceJob
from streamdiff.commands.reference_ring import head_of_ranks
from streamdiff.commands.reference_run import PromptSwitch, ReferenceRun, check_together, run_reference
from streamdiff.config import PROMPT_POLICIES
from streamdiff.errors import ConfigError
from streamdiff.models import tensor_file
from streamdiff.models.autoencoder.autoencoder import load_decoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.headers import NORMALISED, parse_header, read_motion
from streamdiff.models.model import Model
from streamdiff.models.spec import ModelSpec
from streamdiff.models.tensor_file import read_first_steps
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.runner.init_latents import levels_of
from streamdiff.pipeline.runner.step_levels import StepLevels
from streamdiff.video import writer as files


@torch.inference_mode()
def run(job: ReferenceJob) -> int:
    """Make the latents, and the video unless that is not wanted; returns the exit status.

    Raises:
        ConfigError: what was asked for cannot be done; nothing is written then.
    """
    found, reference = prepare(job)
    for note in found.notes():
        print(f"streamdiff: note: {note}", file=sys.stderr)
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        model, ring, check = stack.enter_context(_ring(found))
        if job.prompt_embeds is None:
            reference = replace(reference, embeddings=reference_model.encode(model, job.prompt))
        decoder = None
        if not job.no_decode:
            decoder = PictureDecoder(load_decoder(found.loader.model.found_vae, found.device))
        bar = stack.enter_context(tqdm(total=reference.chunks, unit="chunk", dynamic_ncols=True))
        writer = None
        if job.latents_out is not None:
            about = {
                **NORMALISED,
                "model": job.model.name,
                "kv_context": job.model.kv_context,
                "timesteps": str(reference.schedule.timesteps),
            }
            writing = tensor_file.writing(job.latents_out, "latents", model.spec.chunk_shape, about)
            writer = stack.enter_context(writing)
        made = run_reference(model, found.device, reference, stages=job.model.stages, ring=ring, check=check)
        chunks = _written(made, writer, bar)
        if decoder is not None and job.output is not None:
            files.write_video(job.output, _frames(chunks, decoder), job.fps or model.spec.native_fps)
        else:
            deque(chunks, maxlen=0)
    for path in filter(None, (job.latents_out, job.output if decoder is not None else None)):
        print(f"{path}: {reference.chunks} chunks of {model.spec.chunk_latents} latent frames")
    return 0


@contextmanager
def _ring(found: Found) -> Iterator[tuple[Model, RingExecutor | None, Callable[[], None]]]:
    """The model, as far as this process has it, the ring where it is over processes, and a check that raises where that
    is broken."""
    if found.job.processes:
        with head_of_ranks(found) as ranks:
            yield ranks
    else:
        yield found.load(), None, lambda: None


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


def prepare(job: ReferenceJob) -> tuple[Found, ReferenceRun]:
    """Validate `job` and read its inputs, before any weights are loaded. The embeddings of a prompt that has to be
    encoded are zeros here.

    Raises:
        ConfigError: see `run`.
    """
    _check(job)
    found = reference_model.find(job)
    spec = found.spec
    reference = _read_inputs(job, found)
    check_together(reference, spec.first_chunks)
    return found, reference


def _read_inputs(job: ReferenceJob, found: Found) -> ReferenceRun:
    """Inputs of the run: reads the files, and checks them against the model."""
    assert job.chunks is not None
    spec, schedule = found.spec, found.schedule
    initial = renoise = None
    if job.noise is not None:
        initial, renoise = tensor_file.read_noise(
            job.noise, spec.chunk_shape, steps=schedule.of(0).steps, chunks=job.chunks
        )
    embeddings = torch.zeros(spec.text_shape)
    if job.prompt_embeds is not None:
        embeddings = tensor_file.read_rows(job.prompt_embeds, spec.text_shape)
    levels, noise_level = _read_levels(job, found)
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


def _read_levels(job: ReferenceJob, found: Found) -> tuple[StepLevels | None, Tensor | None]:
    """Read the file of --first-steps: timesteps and noise levels of the steps, and the noise mixed into video."""
    if job.first_steps is None:
        return None, None
    assert job.chunks is not None
    with_video, steps = job.video_latents is not None, found.schedule.of(0).steps
    levels = read_first_steps(
        job.first_steps, found.spec.chunk_latents, steps=steps, chunks=job.chunks, with_video=with_video
    )
    sigmas = levels.sigmas
    if sigmas is None:
        sigmas = levels_of(levels.timesteps.flatten(), found.schedule).view_as(levels.timesteps)
    return StepLevels(levels.timesteps, sigmas), levels.noise_level


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
    latents, shape = _read_chunks(path, spec), parse_header(path).entries["latents"].shape
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
