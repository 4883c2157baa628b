"""The model of `commands.reference`: loaded from its parts, its facts overridden by what was asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from streamdiff.config import ModelConfig
from streamdiff.device import pick_device, pick_dtype
from streamdiff.errors import ConfigError
from streamdiff.models import resolve, sampling
from streamdiff.models.checkpoint import tensor_file
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.checkpoint.safetensors_header import parse_header
from streamdiff.models.interfaces import TextEncoder
from streamdiff.models.model import Model
from streamdiff.models.model_loader import ModelLoader
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.sampling import Schedule
from streamdiff.models.spec import ModelSpec, check_spec, choose_steps
from streamdiff.pipeline.planner.partition import check_stages


@dataclass(frozen=True)
class ReferenceJob:
    """What to make: `model` says which model runs and how, the rest is in `cli.reference_options`. None: the model's
    own, or nothing. `window`, `sink` and `rope` go before those of `model`; a window of 0 is all."""

    model: ModelConfig
    prompt: str = ""
    seed: int = 0
    output: Path | None = None
    fps: float | None = None
    chunks: int | None = None
    latents_out: Path | None = None
    prompt_embeds: Path | None = None
    noise: Path | None = None
    video_latents: Path | None = None
    strength: float | None = None
    motion_noise: bool = False
    container: str | None = None
    model_config: Path | None = None
    shift: float | None = None
    warp: bool = False
    sigmas: tuple[float, ...] | None = None
    first_chunk_steps: tuple[float, ...] | None = None
    window: int | None = None
    sink: int | None = None
    rope: str | None = None
    chunk_frames: int | None = None
    first_chunk_frames: int | None = None
    context_noise: float | None = None
    context_alone: bool | None = None
    context_pictures: bool | None = None
    adaptive_sink: float | None = None
    averaged_sink: float | None = None
    prompt_switch: tuple[str, ...] = ()
    prompt_mix: int | None = None
    no_decode: bool = False


@dataclass(frozen=True)
class Found:
    """A loaded model. `loader` has what decodes, which is not needed for latents."""

    model: Model
    schedule: Schedule
    device: torch.device
    loader: ModelLoader


def load(job: ReferenceJob) -> Found:
    """Find and load what `job` asks for.

    Raises:
        ConfigError: no such model, parts that are missing or do not fit, sizes that cannot be.
    """
    config = job.model
    architecture = None if job.model_config is None else read_object(job.model_config)
    device = pick_device(config.device)
    loader = ModelLoader(resolve.find(config, job.container, architecture), device, config.size)
    spec = _overridden(loader.spec, job)
    schedule = _schedule(job, loader.model, spec)
    if schedule.first is not None and spec.first_chunks > 1:
        raise ConfigError(
            f"the first chunk has {schedule.first.steps} steps, and it is longer than the others; a model with both is "
            "not built. Leave --first-chunk-steps out, or say --first-chunk-frames "
            f"{spec.chunk_latents}"
        )
    if job.video_latents is not None and tensor_file.is_raw(job.video_latents):
        _check_raw(loader.model, job.video_latents)
    if job.video_latents is None and job.noise is None and (remark := loader.model.noise_remark()):
        print(f"streamdiff: note: {remark}", file=sys.stderr)
    denoiser = loader.transformer(pick_dtype(config.dtype, device), kernel=config.attention, quantize=config.quantize)
    check_stages(config.stages, len(denoiser.blocks))
    text: TextEncoder = NoText()
    if job.prompt_embeds is None:
        text = loader.text_encoder(config.keep_text_encoder, config.text_device, config.keep_embeddings)
    seen_again = spec.context_pictures and config.kv_context != "matched"
    past = loader.reencoder() if seen_again else None
    return Found(Model(spec, denoiser, text, None, past), schedule, device, loader)


class NoText:
    """Stands where embeddings are given."""

    examples: tuple[str, ...] = ()
    vocabulary: str = ""
    slow = False

    def read(self, prompt: str, previous: str | None) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")

    def encode(self, text: str) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")


def encode(model: Model, prompt: str) -> Tensor:
    """Embeddings of a prompt by the model's own text encoder."""
    reading = model.text.read(prompt, None)
    if reading.notice:
        print(reading.notice)
    return model.text.encode(reading.text)


def _check_raw(place: ResolvedModel, path: Path) -> None:
    """Latents that are not normalised are let through where the model's authors begin with such, or nobody knows it."""
    if place.entry is not None and place.entry.encode_normalised is not False:
        raise ConfigError(
            f"{path}: its latents are not normalised, and {place.name} knows normalised ones; encode it without --raw"
        )
    print(f"streamdiff: note: {path}: its latents are not normalised, and are used as they are", file=sys.stderr)


def _schedule(job: ReferenceJob, place: ResolvedModel, spec: ModelSpec) -> Schedule:
    """The denoise steps: those given, else the model's own."""
    if job.model.timesteps is not None:
        schedule = _given(job, job.model.timesteps, job.sigmas)
        if job.first_chunk_steps is None:
            return schedule
        return replace(schedule, first=_given(job, job.first_chunk_steps, None))
    if job.sigmas is not None or job.warp or job.shift is not None or job.first_chunk_steps is not None:
        raise ConfigError("--sigmas, --shift, --warp and --first-chunk-steps go with a list: --steps 1000,750,500,250")
    if not spec.steps:
        raise ConfigError("--steps is missing: the timesteps the model is told, for example 1000,937.5,833.33,625")
    return spec.schedule(choose_steps(job.model.steps, spec.steps, place.name))


def _given(job: ReferenceJob, steps: tuple[float, ...], sigmas: tuple[float, ...] | None) -> Schedule:
    """The schedule of a list that was given."""
    if job.sigmas is not None:
        if job.warp or job.shift is not None:
            raise ConfigError("--sigmas says the noise levels, so leave --shift and --warp out")
        return sampling.from_timesteps(steps, sigmas)
    if not job.warp and job.shift is not None:
        raise ConfigError("--shift is for lists that are meant before it: add --warp, or leave it out")
    return sampling.published(steps, shift=job.shift or 1.0, warp=job.warp)


def _overridden(spec: ModelSpec, job: ReferenceJob) -> ModelSpec:
    """`spec` with the sizes, window, sink, positions and context noise that were asked for."""
    assert job.chunks is not None
    chunk, height, width = spec.chunk_latents, spec.latent_height, spec.latent_width
    for path, name in ((job.noise, "initial"), (job.video_latents, "latents")):
        if path is not None:
            shape = _shape(path, name)
            chunk = shape[2] if len(shape) == 5 else chunk
            sides = shape[-2:] if len(shape) in (4, 5) else (height, width)
            if job.model.size is not None and sides != (height, width):
                raise ConfigError(f"--size is {job.model.size}, but {path} is for another; leave --size out")
            height, width = sides
    chunk = job.chunk_frames or chunk
    first = job.first_chunk_frames or (spec.first_chunks * chunk if chunk == spec.chunk_latents else chunk)
    window = spec.window_latents if job.window is None else job.window
    sink = spec.sink_latents if job.sink is None else job.sink
    if not sink:  # the model's own way with a sink has nothing to go on then
        spec = replace(spec, adaptive_sink=None, averaged_sink=None)
    spec = replace(
        spec,
        chunk_latents=chunk,
        latent_height=height,
        latent_width=width,
        height=height * spec.height // spec.latent_height,
        width=width * spec.width // spec.latent_width,
        window_latents=window or chunk * job.chunks,
        clean_window_latents=spec.clean_window_latents if job.window is None else None,
        sink_latents=sink,
        rope=job.rope or spec.rope,
        adaptive_sink=spec.adaptive_sink if job.adaptive_sink is None else job.adaptive_sink,
        averaged_sink=spec.averaged_sink if job.averaged_sink is None else job.averaged_sink,
        first_chunks=_first_chunks(first, chunk, job.chunks),
        context_sigma=spec.context_sigma if job.context_noise is None else job.context_noise / sampling.TIMESTEPS,
        context_alone=spec.context_alone if job.context_alone is None else job.context_alone,
        context_pictures=spec.context_pictures if job.context_pictures is None else job.context_pictures,
        text_shape=_text_shape(spec, job),
    )
    check_spec(spec)
    return spec


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
    """Shape of a tensor in a file; empty where it is not there (told later)."""
    entry = parse_header(path).entries.get(name)
    return () if entry is None else tuple(entry.shape)


def _text_shape(spec: ModelSpec, job: ReferenceJob) -> tuple[int, int]:
    """(text tokens, text width): as many rows as the embeddings have."""
    if job.prompt_embeds is not None:
        entry = parse_header(job.prompt_embeds).entries.get("prompt_embeds")
        if entry is not None and len(entry.shape) in (2, 3):
            return entry.shape[-2], spec.text_shape[1]
    return spec.text_shape
